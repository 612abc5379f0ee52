"""Checks who a request is said to come from: its session, program, conversation and title."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.message_digests import MessageDigester
from hearth.proxy.request.session_id import (
    NAME_CHARS_MAX,
    TITLE_CHARS_MAX,
    api_key_digest,
    client_of,
    conversation_of,
    session_digest,
    session_of,
    title_of,
)
from hearth.shared.wire_messages import Speaker

UUID = "0bdebb2e-1b25-40c6-9a98-c1d63379751b"
THREAD = "01a1fd75-5fc9-79f2-a1e6-87f95e21a1f1"
MAIN = "01a1fd75-588d-78b0-89ad-7869b891a253"
CLAUDE_USER = f'{{"device_id":"27aba4e5","account_uuid":"","session_id":"{UUID}"}}'
HEADERS = (
    *("x-claude-code-session-id", "x-claude-code-agent-id", "x-session-id", "x-parent-session-id"),
    *("thread-id", "session-id", "session_id", "x-codex-parent-thread-id"),
)
FIELDS = ("prompt_cache_key", "session_id", "conversation_id", "thread_id", "chat_id")


def session_in(**body: Any) -> str:
    return session_of({}, body, "").session


@pytest.mark.parametrize(
    ("headers", "speaker"),
    [
        ({"x-claude-code-session-id": UUID}, Speaker("k", UUID)),
        (
            {"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "ac46e11e"},
            Speaker("k", UUID, "ac46e11e"),
        ),
        ({"x-session-id": "ses_e0"}, Speaker("k", "ses_e0")),
        (
            {"x-session-id": "ses_e1", "x-parent-session-id": "ses_e0"},
            Speaker("k", "ses_e1", "", "ses_e0"),
        ),
        ({"session-id": MAIN, "thread-id": MAIN}, Speaker("k", MAIN)),
        ({"session-id": MAIN, "thread-id": THREAD}, Speaker("k", THREAD, "", MAIN)),
        (
            {"session-id": MAIN, "thread-id": THREAD, "x-codex-parent-thread-id": "p"},
            Speaker("k", THREAD, "", "p"),
        ),
        ({"session_id": "pi"}, Speaker("k", "pi")),
        ({"x-claude-code-agent-id": "a", "x-parent-session-id": "p"}, Speaker("k")),
        ({"x-request-id": "r", "traceparent": "t"}, Speaker("k")),
    ],
)
def test_a_header_names_the_session(headers: dict[str, str], speaker: Speaker) -> None:
    assert session_of(headers, {}, "k") == speaker


def test_the_program_is_known_by_its_headers_alone() -> None:
    """Its habits explain what an echo lost: a body that anybody may write says nothing of it."""
    assert session_of({"x-claude-code-session-id": UUID}, {}, "k").client == "claude-code"
    agent = {"user-agent": "claude-cli/2.1.329 (external, cli)"}
    assert session_of(agent, {}, "k").client == "claude-code"
    body = {"session_id": "s", "user-agent": "claude-cli/2", "x-claude-code-session-id": UUID}
    for headers in ({}, {"user-agent": "codex/1 claude-cli/2"}, {"x-session-id": "s"}):
        assert session_of(headers, body, "k").client != "claude-code"


def test_a_header_counts_more_than_the_body() -> None:
    body = {"prompt_cache_key": MAIN, "metadata": {"user_id": CLAUDE_USER}}
    assert session_of({"thread-id": THREAD}, body, "").session == THREAD
    assert session_of({"thread-id": ""}, body, "").session == UUID


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        (CLAUDE_USER, UUID),
        (f"user_27aba4e5_account__session_{UUID}", UUID),
        ("user_27aba4e5", ""),
        ("alice@example.org", ""),
        (f"user_27aba4e5_session_{UUID}x", ""),
        (f"_session_{UUID[:-1]}g", ""),
        (f"{UUID}", ""),
        ("alice_session_1", ""),
        ('{"device_id":"27aba4e5"}', ""),
        ('{"session_id":["x"]}', ""),
        ('{"session_id":', ""),
        ('"x"', ""),
        (7, ""),
        (None, ""),
        ("[" * 4_000, ""),
        (" " * 4_096 + CLAUDE_USER, ""),
    ],
)
def test_a_users_id_is_a_session_only_where_it_says_so(user_id: Any, session: str) -> None:
    assert session_in(metadata={"user_id": user_id}) == session


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_names_the_session_at_the_top_and_nested(field: str) -> None:
    assert session_in(**{field: "ü" * 256}) == "ü" * 256
    assert session_in(metadata={field: "s"}) == "s"
    assert session_in(extra_body={field: 12}) == "12"
    assert session_in(metadata={"more": {field: "s"}}) == ""


def test_fields_count_in_their_order_and_the_top_first() -> None:
    body: dict[str, Any] = {field: field for field in FIELDS}
    for field in FIELDS:
        assert session_in(metadata={field: "nested"}, **body) == field
        del body[field]
        assert session_in(metadata={field: "nested"}, **body) == "nested"


@pytest.mark.parametrize(
    "value",
    ["", " ", "a\nb", "a\0", "\ud800", "x" * 257, True, 1.5, 2**70, 10**5000, None, [], {"a": 1}],
    ids=range(13),
)
def test_what_cannot_be_a_name_is_ignored(value: Any) -> None:
    assert session_in(session_id=value) == ""
    assert session_in(session_id=value, chat_id="c") == "c"
    if type(value) is str:
        assert session_of({"x-session-id": value}, {"chat_id": "c"}, "").session == "c"


def test_an_api_key_is_known_by_a_digest() -> None:
    assert api_key_digest({"x-api-key": "sk-1"}) == "0f2c10bf3d128c71"  # of its SHA-256
    assert api_key_digest({"x-api-key": "sk-2"}) != "0f2c10bf3d128c71"
    assert api_key_digest({}) == api_key_digest({"authorization": "Bearer sk-1"}) == ""


WORDS = st.sampled_from([*FIELDS, "metadata", "extra_body", "user_id", "other"])
JSON = st.recursive(
    (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=300)
        | st.sampled_from([CLAUDE_USER, f"u_session_{UUID}", "{", '{"session_id":"s"}'])
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(HEADERS), st.text(max_size=300), max_size=4),
    st.dictionaries(WORDS, JSON, max_size=6),
    st.text(max_size=4),
)
def test_any_request_has_a_speaker(headers: Any, body: Any, key: str) -> None:
    speaker = session_of(headers, body, key)
    assert speaker.key == key
    for name in (speaker.session, speaker.agent, speaker.parent):
        assert type(name) is str
        assert len(name) <= 256
        assert name.isprintable()
    if speaker.agent or speaker.parent:
        assert speaker.session
        assert speaker.parent != speaker.session


# ---------------------------------------------------------------- the program that asks


CHROME = "Mozilla/5.0 (Macintosh) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/141.0.0.0"
AGENTS = {  # as the programs send them: captured requests, and the SDKs' sources
    "claude-cli/2.1.329 (external, cli)": ("claude-code", "Claude Code 2.1"),
    "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm-256color": ("codex", "Codex 0.169"),
    "opencode/1.18.33 ai-sdk/provider-utils/4.0.23": ("opencode", "opencode 1.18"),
    "QwenCode/0.24.4 (linux; x64)": ("qwen-code", "Qwen Code 0.24"),
    "pi (linux 6.18.44; x64)": ("pi", "Pi"),
    "ai-sdk/openai-compatible/3.0.37 runtime/bun/1.3.13": ("ai-sdk", "AI SDK 3.0"),
    "OpenAI/JS 7.15.0": ("js-openai", "js openai 7.15"),
    "OpenAI/Python 2.3.0": ("python-openai", "python openai 2.3"),
    "AsyncOpenAI/Python 2.3.0": ("python-openai", "python openai 2.3"),
    "Python/3.12 aiohttp/3.9.5": ("aiohttp", "aiohttp 3.9"),
    "curl/8.5.0": ("curl", "curl 8.5"),
    f"{CHROME} Safari/537.36": ("chrome", "Chrome 141.0"),
    f"{CHROME} CherryStudio/1.5.1 Electron/31 Safari/537.36": ("cherrystudio", "CherryStudio 1.5"),
    "Mozilla/5.0 (X11; rv:130.0) Gecko/20100101 Firefox/130.0": ("firefox", "Firefox 130.0"),
    "Mozilla/5.0 (Mac) AppleWebKit/605 Version/18.1 Safari/605": ("safari", "Safari"),
    "node": ("node", "node"),
    "": ("", ""),
    "\u202e\x1b[31m": ("31m", "31m"),
    "()()": ("", ""),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_a_program_has_a_word_for_ids_and_a_name_for_people(agent: str) -> None:
    word, text = client_of({"user-agent": agent})
    assert (word, text) == AGENTS[agent]


def test_claude_codes_header_names_it_whatever_speaks_for_it() -> None:
    word, text = client_of({"x-claude-code-session-id": "s", "user-agent": "node"})
    assert (word, text) == ("claude-code", "Claude Code")


@given(st.text(max_size=700))
def test_whatever_is_sent_gives_a_short_name_that_can_be_printed(agent: str) -> None:
    word, text = client_of({"user-agent": agent})
    assert len(word) <= NAME_CHARS_MAX and len(text) <= NAME_CHARS_MAX + 16
    assert text.isprintable() and text.isascii()
    assert set(word) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert bool(word) == bool(text)


# ---------------------------------------------------------------- the conversation


FIRST = {"role": "user", "content": "What is in this folder?"}
LATER = [{"role": "assistant", "content": "Files."}, {"role": "user", "content": "Which?"}]
CACHED = {"type": "text", "text": FIRST["content"], "cache_control": {"type": "ephemeral"}}
ASKED = {"role": "user", "content": [CACHED]}
SAID = {"type": "text", "text": "s"}
SHOWN = {"role": "user", "content": [{"type": "image", "source": {"url": "https://a.b/c"}}]}
SYSTEM = {"role": "system", "content": "You are terse."}


def digest(body: dict[str, Any], key: str = "k", group: str = "g", **headers: str) -> bytes:
    return session_digest(key, group, headers, body)


def test_a_conversation_without_a_session_id_is_known_by_its_opening() -> None:
    uncached = {"role": "user", "content": [CACHED | {"cache_control": None}]}
    for before, after in (
        ({"messages": [FIRST]}, {"messages": [FIRST, *LATER]}),
        ({"messages": [SYSTEM, FIRST]}, {"messages": [SYSTEM, FIRST, *LATER]}),
        ({"system": "s", "messages": [FIRST]}, {"system": "s", "messages": [FIRST, *LATER]}),
        ({"input": [FIRST]}, {"input": [FIRST, *LATER]}),
        ({"input": FIRST["content"]}, {"input": [{"type": "message", **FIRST}, *LATER]}),
        ({"messages": [ASKED]}, {"messages": [uncached, *LATER]}),
        ({"messages": [FIRST]}, {"messages": [ASKED, *LATER]}),
        ({"system": "s", "messages": [FIRST]}, {"system": [SAID], "messages": [FIRST, *LATER]}),
        ({"messages": [SHOWN]}, {"messages": [SHOWN, *LATER]}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
    ):
        assert digest(before) == digest(after), before
        assert digest(before) != digest({"messages": [{"role": "user", "content": "Other"}]})


def test_a_named_session_is_the_same_whatever_it_says_and_sub_agents_are_told_apart() -> None:
    named = {"x-claude-code-session-id": "s1"}
    assert digest({"messages": [FIRST]}, **named) == digest({"messages": LATER}, **named)
    agent = named | {"x-claude-code-agent-id": "a1"}
    assert digest({"messages": [FIRST]}, **named) != digest({"messages": [FIRST]}, **agent)


def test_keys_and_groups_are_told_apart() -> None:
    body = {"messages": [FIRST]}
    assert len({digest(body), digest(body, key="other"), digest(body, group="other")}) == 3


# ---------------------------------------------------------------- of a parsed request


def conversation(*contents: str, agent: str = "curl/8.5", **fields: Any) -> str:
    """Return what the conversation of a user's messages is told by, answers between them."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    messages = [{"role": "system", "content": fields.pop("system", "You help.")}, *messages]
    names, _ = MessageDigester(True, False).names(messages)
    return conversation_of(session_of({"user-agent": agent}, fields, "k"), messages, names)


def test_a_conversation_that_no_client_names_is_told_by_its_client_and_its_first_question() -> None:
    name = conversation("Fix it")
    assert re.fullmatch("curl-[0-9a-f]{8}", name)
    assert conversation("Fix it", "Done.", "And now?") == name, "it stays the same"
    assert conversation("Fix it", agent="curl/9.1") == name, "whatever its client's version"
    assert conversation("Fix it", system="Another day.") == name
    assert conversation("Fix that") != name
    assert conversation("Fix it", agent="pi (linux)") == f"pi-{name[5:]}"
    assert conversation("Fix it", agent="") == f"client-{name[5:]}"


def test_what_changes_in_the_first_question_by_itself_makes_no_other_conversation() -> None:
    reminder = "<system-reminder>\n{}\n</system-reminder>\n"
    names = {conversation(reminder.format(day) + "Fix it") for day in ("Monday", "Tuesday")}
    assert len(names) == 1
    assert conversation(reminder.format("Monday")) == "", "nothing of it stays"


def test_a_session_that_is_named_is_told_by_its_name() -> None:
    assert conversation("Fix it", session_id="s") == ""
    speaker = Speaker("k", "s", client="pi", conversation="pi-1")
    assert speaker.label == "s"
    assert replace(speaker, session="").label == "pi-1"
    assert replace(speaker, session="", conversation="").label == "pi"
    assert Speaker("k").label == "anonymous"


# ---------------------------------------------------------------- its title


REMINDER = "<system-reminder>\nThe date is today.\n</system-reminder>\n"


def asked(*contents: Any) -> list[dict[str, Any]]:
    system = {"role": "system", "content": "You help."}
    return [system, *({"role": "user", "content": content} for content in contents)]


CASES: dict[str, tuple[list[Any], str]] = {
    "plain words": (["Fix the test"], "Fix the test"),
    "the first line of them": (["\n  Fix   the test\n\nIt fails."], "Fix the test"),
    "Claude Code: reminders before": ([f"{REMINDER}{REMINDER}Fix it"], "Fix it"),
    "Claude Code: a message of reminders": ([REMINDER, "Fix it"], "Fix it"),
    "parts, one of them a reminder": (
        [[{"type": "text", "text": REMINDER}, {"type": "text", "text": "Fix it"}]],
        "Fix it",
    ),
    "an image beside the words": (
        [[{"type": "image", "image": "x"}, {"type": "text", "text": "What is it?"}]],
        "What is it?",
    ),
    "Claude Code: a command of its own": (
        [
            "<command-message>init is running</command-message>\n"
            "<command-name>/init</command-name>\n<command-args>fast</command-args>"
        ],
        "/init fast",
    ),
    "Codex: the environment": (
        ["<environment_context>\n <cwd>/home</cwd>\n</environment_context>", "Fix it"],
        "Fix it",
    ),
    "Codex: the project's instructions": (
        ["# AGENTS.md instructions for /home\n\n<INSTRUCTIONS>\nBe kind.\n</INSTRUCTIONS>\nFix it"],
        "Fix it",
    ),
    "Cline: the task in tags": (
        ["<task>\nFix it\n</task>\n<environment_details>\nA file\n</environment_details>"],
        "Fix it",
    ),
    "OpenClaw: when it was written": (
        ["[Sat 2026-11-21 10:03 UTC] Fix it\n\nRuntime: x"],
        "Fix it",
    ),
    "opencode: words in quotes": (['"Fix it"'], "Fix it"),
    "tags of the person's own": (["Why is <b>bold</b> text thin?"], "Why is text thin?"),
    "a tag that nothing closes": (["Is <br> closed?"], "Is <br> closed?"),
    "control characters": (["Fix\x1b[31m \u202eit\x00"], "Fix[31m it"),
    "no words": (["", "  \n", "?!", "---"], ""),
    "nobody asked": ([], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_title_is_what_a_person_asked_first(name: str) -> None:
    contents, title = CASES[name]
    assert title_of(asked(*contents)) == title


def test_a_long_question_ends_in_whole_words() -> None:
    title = title_of(asked("word " * 100))
    assert title == "word " * 13 + "word…" and len(title) <= TITLE_CHARS_MAX
    assert title_of(asked("x" * 999)) == "x" * (TITLE_CHARS_MAX - 1) + "…"


@given(st.lists(st.text(alphabet="<>/ab \n-[]2026\"'\ud800\x1b", max_size=300), max_size=9))
def test_whatever_is_asked_gives_a_short_line_that_can_be_sent_and_printed(
    contents: list[str],
) -> None:
    title = title_of(asked(*contents))
    assert len(title) <= TITLE_CHARS_MAX and title.isprintable()
    assert title.encode() is not None, "no lone surrogate"
