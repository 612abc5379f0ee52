"""A conversation that no client names is told by what each of its requests has."""

import re
from dataclasses import replace
from typing import Any

from hearth.proxy.request.conversation_names import conversation_of, session_digest
from hearth.proxy.request.message_digests import MessageDigester
from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import Speaker

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
