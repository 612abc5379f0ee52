"""Checks which changes by a client keep a message's canonical digest, and which change it.

Excerpts are from the traces that each rule's `evidence` names: ordinary words are pseudo-words
there, what is volatile is as it was sent.
"""

import copy
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hearth.proxy.api import chat_completions
from hearth.proxy.api.body.tool_definitions import tool_call
from hearth.proxy.request.message_digests import REMEMBERED_MAX, MessageDigester
from hearth.proxy.request.volatile_fields import (
    BLOCKS,
    FIELDS,
    canonical_text,
    telemetry_dropped,
    without_telemetry,
)
from hearth.shared.wire_messages import MessageName

BILLING = "x-anthropic-billing-header: cc_version=2.1.329.649; cc_entrypoint=sdk-cli;"
REMINDER = (
    "<system-reminder>\nNut current date is: Saturday, November 21, 2026. Taho: Voki is nut "
    'zirotareherud current date — it may nuhobi hopu nut "Today\'s date" cizafeziv.\n'
    "</system-reminder>"
)
CONTEXT = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nRirubugadomu pabe (pabe, han fodogesacufo):\n"
    '"Kakiha leka divopato:\\nnone"\n\n"## Kakiha Subagents\\nnone"\n'
    "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
)
CONVERSATION_INFO = (
    'Conversation info (untrusted metadata):\n```json\n{\n  "message_id": "4542",\n'
    '  "timestamp": "Sat 2026-03-28 16:12 PDT"\n}\n```'
)
USAGE = "<usage>subagent_tokens: 11998\ntool_uses: 4\nduration_ms: 1535</usage>"
USAGE_XML = (
    "<usage><subagent_tokens>23221</subagent_tokens><tool_uses>4</tool_uses>"
    "<duration_ms>2029</duration_ms></usage>"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def names_of(*messages: Any, is_on: bool = True, checks_size: bool = False) -> list[MessageName]:
    return MessageDigester(is_on, checks_size).names(list(messages))[0]


def name_of(message: dict[str, Any]) -> MessageName:
    return names_of(message)[0]


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


def test_a_block_is_taken_from_where_the_last_one_begins() -> None:
    text = f"<system-reminder>\nmine, never closed\n{REMINDER}\nafter"
    assert canonical_text("user", text)[0] == "<system-reminder>\nmine, never closed\nafter"


def test_blank_lines_go_with_what_they_set_apart_and_others_stay() -> None:
    assert canonical_text("user", f"a\n\nb\n\n{REMINDER}\n\n")[0] == "a\n\nb"
    assert canonical_text("user", f"a\n\n{REMINDER}\n\nb\n")[0] == "a\n\nb\n"
    assert canonical_text("user", f"a\n  {REMINDER} \r\nb")[0] == "a\nb"


def test_every_rule_says_what_it_was_seen_in_and_is_bound_to_one_line() -> None:
    for field in FIELDS:
        assert len(field.evidence) > 40
        assert not field.pattern.flags & (re.DOTALL | re.MULTILINE)
    assert all(len(block.evidence) > 40 for block in BLOCKS)


# ---------------------------------------------------------------- names


def test_a_message_of_volatile_blocks_alone_leaves_no_trace() -> None:
    first, trailing = names_of(user("Tun cita"), user(CONTEXT))
    assert (trailing.canonical, trailing.rules) == (b"", ["inbound_context"])
    assert first.canonical
    assert name_of(user(f"{REMINDER}\n{REMINDER}\n")).canonical == b""
    assert name_of({"role": "system", "content": BILLING}).canonical == b""


def test_an_empty_message_and_a_result_of_a_reminder_alone_are_still_messages() -> None:
    assert name_of(user("")).canonical
    result = {"role": "tool", "content": REMINDER, "tool_call_id": "c"}
    assert name_of(result).canonical == name_of(result | {"content": ""}).canonical != b""


def assistant(content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def calling(arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return assistant(tool_calls=[tool_call(call_id, "price", arguments)])


def test_what_the_model_said_is_recognised_as_clients_echo_it() -> None:
    said = assistant("\n\nTun nut.\n", reasoning_content="why", signatures=["s"])
    echoes = [assistant("Tun nut."), assistant("Tun nut.\n", signatures=["t"])]
    assert {name_of(echo).canonical for echo in echoes} == {name_of(said).canonical}
    assert name_of(said).exact not in {name_of(echo).exact for echo in echoes}
    assert name_of(assistant("Tun  nut.")).canonical != name_of(said).canonical


def test_a_call_is_known_by_its_name_and_what_its_arguments_are() -> None:
    call = calling('{"b": [5000.0, {"x": -0.0}], "a": "caf\\u00e9"}')
    echo = calling({"a": "café", "b": [5000, {"x": 0}]}, "call1")
    assert name_of(call).canonical == name_of(echo).canonical
    assert name_of(call).exact != name_of(echo).exact
    for other in ({"a": "café", "b": [5001, {"x": 0}]}, {"a": "café", "b": [True, {"x": 0}]}):
        assert name_of(calling(other)).canonical != name_of(call).canonical
    assert name_of(calling({"n": True})).canonical != name_of(calling({"n": 1})).canonical
    past_doubles = (calling({"n": 2**53 + 1}), calling({"n": 2**53}))
    assert len({name_of(row).canonical for row in past_doubles}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"role": "system"},
        {"content": "x"},
        {"reasoning_content": "x"},
        {"tool_calls": [tool_call("c", "f", {"b": 1.0, "a": 2})]},
        {"tool_calls": [tool_call("d", "f", {"a": 2, "b": 1.0})]},
        {"tool_calls": [tool_call("c", "f", {"a": 2, "b": 1})]},
        {"tool_call_id": "x"},
        {"name": "x"},
        {"tool_references": ["x"]},
    ],
)
def test_the_exact_digest_tells_everything_that_is_shown_apart(change: dict[str, Any]) -> None:
    message = user("hi") | {"tool_calls": [tool_call("c", "f", {"a": 2, "b": 1.0})]}
    assert name_of(message | change).exact != name_of(message).exact
    assert name_of(message | {"signatures": ["not shown"]}).exact == name_of(message).exact


def test_a_result_is_known_without_the_id_of_its_call() -> None:
    results = [{"role": "tool", "content": "r", "tool_call_id": i} for i in ("call_X", "callX")]
    assert len({name_of(row).canonical for row in results}) == 1
    assert len({name_of(row).exact for row in results}) == 2


def showing(*parts: str, role: str = "user") -> dict[str, Any]:
    """Return a message of texts, and of images where a part begins with a #."""
    content = [
        {"type": "image", "image": part} if part.startswith("#") else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": role, "content": content}


def test_another_image_is_another_message_and_so_is_its_place() -> None:
    rows = [
        *(showing("#1"), showing("#2"), showing("#1", "#1"), showing("#1", "#2")),
        *(showing("#2", "#1"), showing("a", "#1"), showing("#1", "a"), showing("b", "#1")),
        *(showing("#1", role="tool"), user("#1"), user("a"), user("")),
    ]
    named = names_of(*rows)
    assert len({name.exact for name in named}) == len(rows)
    assert len({name.canonical for name in named}) == len(rows)
    assert named == names_of(*copy.deepcopy(rows))


@pytest.mark.parametrize("role", ["user", "tool"])
def test_volatile_fields_beside_an_image_are_left_out_as_without(role: str) -> None:
    plain = name_of(showing("#1", "Tun cita", role=role))
    reminded = name_of(showing(f"{REMINDER}", "#1", f"Tun cita\n{USAGE}", role=role))
    assert reminded.canonical == plain.canonical != b""
    assert reminded.exact != plain.exact
    assert set(reminded.rules) == {"system_reminder", "run_statistics"}
    assert name_of(showing(REMINDER, "#1", role=role)).canonical != b"", "it shows something"


def test_delta_counts_text_alone_beside_an_image() -> None:
    rows = [user("Tun cita"), showing("#1" * 999, f"a\n{CONTEXT}", "#2")]
    assert MessageDigester(True, False).names(rows)[1] == len(CONTEXT) + 1
    names, delta = MessageDigester(True, True).names(rows)
    assert delta == 0 and names[1].canonical == names[1].exact
    (off,) = MessageDigester(False, True).names(rows[1:])[0]
    assert off.canonical == off.exact == names[1].exact


def test_delta_counts_the_characters_that_the_canonical_forms_lack() -> None:
    rows = [user("Tun cita"), assistant(" yes \n"), user(CONTEXT)]
    assert MessageDigester(True, False).names(rows)[1] == len(CONTEXT) + 3
    assert MessageDigester(True, False).names([user("[Sat 2026-11-21 10:03 UTC] x")])[1] == 26 - 5


def test_switched_off_a_conversation_is_known_by_its_exact_text() -> None:
    rows = [user(f"{REMINDER}\nhi"), assistant(" a "), user(CONTEXT)]
    names, delta = MessageDigester(False, True).names(rows)
    assert delta == 0
    assert all(name.canonical == name.exact and name.rules == [] for name in names)
    assert [name.exact for name in names] == [name.exact for name in names_of(*rows)]


def test_a_conversation_that_shrinks_by_over_a_tenth_is_known_by_its_exact_text() -> None:
    text = "x" * 9 * len(CONTEXT)
    at_most = [user(text), user(CONTEXT)]
    names, delta = MessageDigester(True, True).names(at_most)
    assert (names[1].canonical, delta) == (b"", len(CONTEXT))
    over = [user(text[:-10]), user(CONTEXT)]
    names, delta = MessageDigester(True, True).names(over)
    assert delta == 0
    assert all(name.canonical == name.exact and name.rules == [] for name in names)
    assert names_of(*over)[1].canonical == b""


def test_what_was_seen_before_is_named_the_same_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hearth.proxy.request.message_digests.REMEMBERED_MAX", 3)
    digester = MessageDigester(True, False)
    rows = [user(f"{REMINDER}\n{n}") for n in range(5)]
    assert digester.names(rows) == digester.names(rows)
    assert digester.remembered_count == 3
    assert REMEMBERED_MAX > 10_000


def test_a_long_conversation_that_was_seen_costs_little() -> None:
    rows = [user(f"{n} {REMINDER}\n" + "lorem ipsum " * 100) for n in range(300)]
    assert sum(len(row["content"]) for row in rows) > 400_000
    new, again = [], []
    for _ in range(20):
        digester = MessageDigester(True, False)
        new.append(seconds_of(digester, rows))
        again.append(seconds_of(digester, rows))
    assert min(again) < min(new) / 2, (min(new), min(again))


def seconds_of(digester: MessageDigester, rows: list[Any]) -> float:
    rows = copy.deepcopy(rows)
    began = time.process_time()
    digester.names(rows)
    return time.process_time() - began


LINES = st.sampled_from(
    [
        *(text for _, text in NEAR_MISSES),
        *(REMINDER, CONTEXT, CONVERSATION_INFO, USAGE, USAGE_XML, BILLING, "", " ", "a", "```"),
        *("<system-reminder>", "</system-reminder>", "Today's date is 2026-11-21.", "cch=12345;"),
        *("Sender (untrusted metadata):", "```json", "[Sat 2026-11-21 10:03 UTC] x"),
    ]
)


@settings(max_examples=200)
@given(st.sampled_from(["system", "user", "tool"]), st.lists(LINES, max_size=8))
def test_a_canonical_form_is_shorter_whole_lines_of_the_text_and_has_none_itself(
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
    before = telemetry_dropped.blocks, telemetry_dropped.chars
    assert without_telemetry(BILLING) == ""
    assert without_telemetry(f"{BILLING} cch=56445; cc_workload=cron;\n\nRol pal") == "\nRol pal"
    assert without_telemetry(f"{BILLING} cc_is_subagent=true;\n{BILLING}") == BILLING
    assert telemetry_dropped.blocks - before[0] == 3
    assert telemetry_dropped.chars - before[1] > 3 * len(BILLING)


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
    before = telemetry_dropped.blocks
    assert without_telemetry(text) == text
    assert telemetry_dropped.blocks == before


@settings(max_examples=200)
@given(st.text(st.sampled_from("x-anthropic-billing-header: cc_version=2;\n"), max_size=60))
def test_any_text_keeps_all_but_a_first_line(text: str) -> None:
    left = without_telemetry(BILLING + text)
    assert left == BILLING + text or left == text.partition("\n")[2]


def test_the_same_line_in_other_dialects_reaches_the_model() -> None:
    row = {"role": "system", "content": f"{BILLING}\nRol pal"}
    prompt = chat_completions.parse({"model": "m", "messages": [row, user("hi")]}).prompt
    assert prompt.messages[0]["content"] == f"{BILLING}\nRol pal"
