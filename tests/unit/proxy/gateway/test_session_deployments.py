"""A session is sent where its last turn was answered."""

from typing import Any

from hearth.proxy.gateway.session_deployments import session_digest

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
