"""Checks the session id and the key that are read from captured headers and bodies of clients."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.request.session_id import key_digest, session_of
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
    assert key_digest({"x-api-key": "sk-1"}) == "0f2c10bf3d128c71"  # of its SHA-256
    assert key_digest({"x-api-key": "sk-2"}) != "0f2c10bf3d128c71"
    assert key_digest({}) == key_digest({"authorization": "Bearer sk-1"}) == ""


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
