"""Checks which changes by a client keep a message's canonical digest, and which change it.

Excerpts are from the traces that each rule's `evidence` names: ordinary words are pseudo-words
there, what is volatile is as it was sent.
"""

import re

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.volatile_fields import FIELDS, canonical_text, without_telemetry
from tests.helpers.proxy.volatile_texts import (
    BILLING,
    CONTEXT,
    CONVERSATION_INFO,
    INBOUND,
    REMINDER,
    SHORT_INBOUND,
    USAGE,
    USAGE_XML,
    name_of,
    user,
)

# ---------------------------------------------------------------- one rule after the other


@pytest.mark.parametrize(
    ("rule", "role", "one", "other"),
    [
        (
            "billing_header",
            "system",
            f"{BILLING}\nRol pal",
            f"{BILLING} cc_is_subagent=true;\nRol pal",
        ),
        ("cch", "system", "telemetry cch=56445; cli", "telemetry cch=0af31; cli"),
        (
            "message_id",
            "user",
            "[message_id: om_x100b53d7ec74f8]\nTun cita",
            "[message_id: om_x100b531f570748]\nTun cita",
        ),
        (
            "message_id",
            "user",
            '{\n  "message_id": "4542",\n  "text": "Tun cita"\n}',
            '{\n  "message_id": "om_x100b53d7ec74f8=",\n  "text": "Tun cita"\n}',
        ),
        (
            "message_id",
            "user",
            '{"message_id":"4636","sender_id":"6783429660"}\nTun cita',
            '{"message_id":"1809","sender_id":"6783429660"}\nTun cita',
        ),
        ("message_id", "system", '"message_id": "a1"', '"message_id": "b2c3"'),
        (
            "message_time",
            "user",
            "[Sat 2026-11-21 10:03 UTC] Sere zige voki",
            "[Sun 2026-11-22 09:32 GMT+8] Sere zige voki",
        ),
        (
            "current_time",
            "system",
            "security-review: Vikuvale\n\nToday's date is 2026-11-21.",
            "security-review: Vikuvale\n\nToday's date is 2026-11-22.",
        ),
        (
            "current_time",
            "system",
            "  Dosesaha: pucav\n  Today's date: Sat Nov 21 2026\n</env>",
            "  Dosesaha: pucav\n  Today's date: Sun Nov 22 2026\n</env>",
        ),
        (
            "current_time",
            "system",
            "## Gupuguca Context\nCurrent date: 2026-11-21\nTime gife: UTC",
            "## Gupuguca Context\nCurrent date: 2026-12-01\nTime gife: UTC",
        ),
        (
            "current_time",
            "user",
            "  <current_date>2026-11-21</current_date>\n  <timezone>Etc/UTC</timezone>",
            "  <current_date>2026-11-22</current_date>\n  <timezone>Etc/UTC</timezone>",
        ),
        (
            "current_time",
            "user",
            "Nut current date is: Saturday, November 21, 2026. Taho",
            "Nut current date is: Sunday, November 22, 2026. Taho",
        ),
        (
            "current_time",
            "user",
            "Current time: Friday, April 3rd, 2026 — 5:55 PM (Asia/Shanghai) / 2026-04-03 09:55",
            "Current time: Sunday, May 5th, 2026 — 8:25 AM (Pacific/Auckland) / 2026-05-05 20:25",
        ),
        (
            "current_time",
            "user",
            "Current time: Nov 21, 2026 - 10:03 AM\nTun cita",
            "Current time: Nov 22, 2026 - 9:47 PM\nTun cita",
        ),
        (
            "current_time",
            "system",
            "The current date and time is: 2026-11-21 – 10:03:07 UTC. Taho",
            "The current date and time is: 2026-11-22 – 23:59:00 UTC. Taho",
        ),
        (
            "current_time",
            "system",
            "<env>\n1. Dosesaha: pucav\n2. Date: 11/21/2026\n3. TAP: Vupitupu",
            "<env>\n1. Dosesaha: pucav\n2. Date: 11/22/2026\n3. TAP: Vupitupu",
        ),
        (
            "total_tokens",
            "user",
            "go on\n<total_tokens>14962655 tokens left</total_tokens>",
            "go on\n<total_tokens>14961419 tokens left</total_tokens>",
        ),
        (
            "run_statistics",
            "user",
            "Cepano: none.\n\nStats: runtime 5m12s • tokens 8.2k (in 8.0k / out 200)",
            "Cepano: none.\n\nStats: runtime 800ms • tokens 1.9k (in 1.7k / out 200)",
        ),
        ("run_statistics", "tool", f"Cepano: none.\n{USAGE}", "Cepano: none."),
        ("run_statistics", "user", f"<x>\na\n{USAGE_XML}\n</x>", "<x>\na\n</x>"),
        ("system_reminder", "user", f"{REMINDER}\nKugasa do it", "Kugasa do it"),
        ("system_reminder", "tool", f"     1\tren mid\n\n{REMINDER}\n", "     1\tren mid"),
        ("inbound_context", "user", f"Tun cita\n{CONTEXT}", "Tun cita"),
        ("inbound_context", "user", f"{CONVERSATION_INFO}\n\nYes chrck", "Yes chrck"),
        ("inbound_context", "user", f"{INBOUND}\n\nYes chrck", "Yes chrck"),
        ("inbound_context", "system", f"A\n\n{INBOUND}\n# Project", "A\n\n# Project"),
        ("inbound_context", "user", f"{SHORT_INBOUND}\nYes chrck", "Yes chrck"),
        (
            "inbound_context",
            "system",
            "A\n## Inbound Context (trusted metadata)\nThe following JSON.\n\n```json\n"
            '{\n  "chat_type": "direct"\n}\n```\n# Project Context',
            "A\n# Project Context",
        ),
    ],
)  # fmt: skip
def test_a_rule_makes_two_spellings_one(rule: str, role: str, one: str, other: str) -> None:
    first, second = ({"role": role, "content": text} for text in (one, other))
    assert rule in name_of(first).rules
    assert name_of(first).canonical == name_of(second).canonical
    assert name_of(first).exact != name_of(second).exact


NEAR_MISSES = [
    ("user", BILLING),  # a user may ask about it
    ("system", "a x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"),
    ("system", "x-anthropic-billing-header: cc_version=2.1; and what it means"),
    ("system", "cch=56445 without its end, and notcch=56445;"),
    ("tool", "fetched cch=56445;"),
    ("user", "it looks like [message_id: ...] tag."),
    ("tool", "[message_id: om_x100b53d7ec74f8]"),
    ("user", 'why is "message_id": "4542" in it?'),
    ("user", 'see {"message_id": "4542"}'),
    ("user", '"message_id": 4542,'),
    ("user", '"message_id": "two words"'),
    ("user", '"message_id": "4542" is what it says'),
    ("user", '"reply_to_message_id": "4542",'),
    ("user", '{"text": "hi", "message_id": "4542"}'),
    ("tool", '"message_id": "4542",'),
    ("assistant", '"message_id": "4542",'),
    ("user", "Nov 21, 2026 - 10:03 AM"),
    ("tool", INBOUND),
    ("assistant", INBOUND),
    ("user", "## Inbound Context\n\n```json\n{}\n```"),
    ("user", '## Inbound Context\n\n```python\n"chat_type": "direct"\n```'),
    ("user", '## Inbound Context of it\n\n```json\n{"chat_type": "direct"}\n```'),
    ("user", "# Chapter\n### Inbound Context (trusted metadata)\n```json\n{}\n```"),
    ("user", "## Inbound Context (trusted metadata)\nis what OpenClaw writes"),
    ("user", "it was [Sat 2026-11-21 10:03 UTC]"),
    ("user", "[Saturday] we meet"),
    ("tool", "Current date: 2026-11-21"),
    ("user", "Current time is short"),
    ("user", "the current date is shown in 2 places"),
    ("user", "Bur nut peges current time, fid `session_status`."),
    ("user", "2. Date: 11/21/2026"),
    ("system", "2. Date: 11/21/2026 was the deadline"),
    ("user", "<total_tokens>N</total_tokens> is how"),
    ("user", "<total_tokens>1 000</total_tokens>"),
    ("user", "Stats: runtime errors were seen in 3 tests"),
    ("user", "see Stats: runtime 5s"),
    ("system", "uzoleri <system-reminder> lazi. <system-reminder> lazi tehutan kelapi"),
    ("user", "<system-reminder>a</system-reminder> between <system-reminder>b</system-reminder>"),
    ("user", "<system-reminder>a</system-reminder> and then"),
    ("user", "<system-reminder>\nnever closed"),
    ("user", "never opened\n</system-reminder>"),
    (
        "user",
        "Huzoleri zimumapap by <<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> dec "
        "<<<END_OPENCLAW_INTERNAL_CONTEXT>>> tehutan runtime context",
    ),
    ("system", CONTEXT),
    ("user", "Conversation info (untrusted metadata):\nis what\n```python\nx\n```"),
    ("user", "Conversation info (untrusted metadata): ```json\n{}\n```"),
    ("user", "Sender (untrusted metadata):" + "\nx" * 9 + "\n```json\n{}\n```"),
    ("user", "Sender (untrusted metadata):\n```json\n{}"),
    ("user", "<usage>mid: 1\n</usage>"),
    ("assistant", REMINDER),
    ("assistant", "Today's date is 2026-11-21."),
]


@pytest.mark.parametrize(("role", "text"), NEAR_MISSES)
def test_what_only_looks_volatile_is_content(role: str, text: str) -> None:
    assert canonical_text(role, text) == (text, [])
    assert name_of({"role": role, "content": text}).rules == []


def test_only_the_date_of_a_line_is_left_out() -> None:
    one, other = (
        f"Today's date is now 2026-11-2{day}. Han {word} voki." for day, word in ("1a", "2b")
    )
    assert name_of(user(one)).canonical != name_of(user(other)).canonical
    assert canonical_text("user", one)[0].endswith("Han a voki.")


@pytest.mark.parametrize(
    "rest", ["- 10:30 we meet", "- 3 tasks", "-10:30 we meet", "- 10:30-11:00", "- Nov 22", "-"]
)
def test_what_follows_a_date_behind_a_dash_stays_unless_it_is_a_time_that_ends_there(
    rest: str,
) -> None:
    assert canonical_text("user", f"Today's date is 2026-11-21 {rest}")[0].endswith(rest)


@given(
    st.lists(
        st.sampled_from(
            [
                *("2026-11-21", "Nov 21, 2026", " - ", "-", " – ", "10:03", " AM", "10", ":", "x"),
                *('"message_id"', ": ", '"4542"', ",", "{", "}", " ", '"', "id", "\n", "UTC", "."),
                *("## Inbound Context", "```json", "```", '"chat_type": 1', "(trusted metadata)"),
            ]
        ),
        max_size=12,
    )
)
def test_text_without_a_rules_own_words_in_their_places_is_content(parts: list[str]) -> None:
    text = "".join(parts)
    left, rules = canonical_text("user", text)
    lines = text.split("\n")
    if "current_time" in rules:
        assert "urrent" in text
    if "message_id" in rules:
        assert any(line.lstrip(" {").startswith('"message_id"') for line in lines)
        assert left.count("\0m") <= sum('"message_id"' in line for line in lines)
    if "inbound_context" in rules:
        heading = next(n for n, line in enumerate(lines) if line.startswith("## Inbound Context"))
        assert "```json" in [line.rstrip() for line in lines[heading:]]
    assert bool(rules) == (left != text)


@pytest.mark.parametrize(
    "unit",
    [
        "Today's date is 2026-11-21 - 10:03 AM",
        "Today's date is Nov 21, 2026 - 10:03 AM - " * 2,
        "Current time: " + "- 10:03 " * 4,
        '"message_id": "' + "a" * 200,
        ' {  "message_id" : "a" ',
        '## Inbound Context\n```json\n{"chat_type": 1}\n```\n',
        "## Inbound Context\n```json\n",
        "## Inbound Context (trusted metadata)\n",
    ],
)
@pytest.mark.parametrize("joint", ["", " ", "\n"])
def test_a_long_text_of_near_misses_is_read_in_linear_time(unit: str, joint: str) -> None:
    """A pattern that goes back over what it has read would not end within the test's limit."""
    text = joint.join([unit] * 20_000)
    left, rules = canonical_text("user", text)
    assert (left == text) == (not rules) and len(left) <= len(text)


def test_a_block_is_taken_from_where_the_last_one_begins() -> None:
    text = f"<system-reminder>\nmine, never closed\n{REMINDER}\nafter"
    assert canonical_text("user", text)[0] == "<system-reminder>\nmine, never closed\nafter"


def test_blank_lines_go_with_what_they_set_apart_and_others_stay() -> None:
    assert canonical_text("user", f"a\n\nb\n\n{REMINDER}\n\n")[0] == "a\n\nb"
    assert canonical_text("user", f"a\n\n{REMINDER}\n\nb\n")[0] == "a\n\nb\n"
    assert canonical_text("user", f"a\n  {REMINDER} \r\nb")[0] == "a\nb"


def test_every_rule_is_bound_to_one_line() -> None:
    for field in FIELDS:
        assert not field.pattern.flags & (re.DOTALL | re.MULTILINE)


LINES = st.sampled_from(
    [
        *(text for _, text in NEAR_MISSES),
        *(REMINDER, CONTEXT, CONVERSATION_INFO, USAGE, USAGE_XML, BILLING, "", " ", "a", "```"),
        *("<system-reminder>", "</system-reminder>", "Today's date is 2026-11-21.", "cch=12345;"),
        *("Sender (untrusted metadata):", "```json", "[Sat 2026-11-21 10:03 UTC] x"),
    ]
)


@given(st.sampled_from(["system", "user", "tool"]), st.lists(LINES, max_size=8))
def test_a_canonical_form_is_shorter_and_whole_lines_of_the_text(
    role: str, parts: list[str]
) -> None:
    text = "\n".join(parts)
    left, rules = canonical_text(role, text)
    assert len(left) <= len(text)
    assert (left == text) == (not rules)
    lines = iter(text.split("\n"))
    for line in left.split("\n") if left else []:
        kept = line.partition("\0")[0]  # up to a sentinel
        assert any(original.startswith(kept) for original in lines), line


# ---------------------------------------------------------------- telemetry


def test_the_billing_header_goes_with_its_line() -> None:
    assert without_telemetry(BILLING) == ""
    assert without_telemetry(f"{BILLING} cch=56445; cc_workload=cron;\n\nRol pal") == "\nRol pal"
    assert without_telemetry(f"{BILLING} cc_is_subagent=true;\n{BILLING}") == BILLING


@pytest.mark.parametrize(
    "text",
    [
        f" {BILLING}",
        f"\n{BILLING}",
        f"Rol pal\n{BILLING}",
        f"{BILLING} and more",
        f"{BILLING} cc_secret=1;",
        "x-anthropic-billing-header: cc_version=2.1.329.649; cc_entrypoint=sdk cli;",
        "x-anthropic-billing-header: cc_version=2.1.329.649; cc_entrypoint=sdk-cli",
        "x-anthropic-billing-header:",
        "x-anthropic-billing-header: ",
        BILLING.upper(),
    ],
)
def test_telemetry_that_is_not_its_whole_grammar_is_content(text: str) -> None:
    assert without_telemetry(text) == text


@given(st.text(st.sampled_from("x-anthropic-billing-header: cc_version=2;\n"), max_size=60))
def test_any_text_keeps_all_but_a_first_line(text: str) -> None:
    left = without_telemetry(BILLING + text)
    assert left == BILLING + text or left == text.partition("\n")[2]
