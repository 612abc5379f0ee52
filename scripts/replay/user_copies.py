"""Makes of a captured session what other users of the same agent would have sent.

They share its system prompt and its tools, and nothing behind their first question.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final

from hearth.commands.replay.traces import Body, Captured
from hearth.proxy.request.session_id import session_of

OWN_DIGITS: Final = 8  # of an id, that are its user's own
_TURNS: Final = ("messages", "input")


def as_user(rows: Sequence[Captured], user: int) -> list[Captured]:
    """Return the session as user `user` has it; user 0 is the captured one.

    Ids of sessions and agents are that user's own, and each conversation's first question has the
    user's number in it.
    """
    return [_as_user(row, user) for row in rows] if user else list(rows)


def _as_user(row: Captured, user: int) -> Captured:
    speaker = session_of(row.headers, row.body, "")
    headers, body = json.dumps(dict(row.headers)), json.dumps(row.body)
    for name in filter(None, (speaker.session, speaker.agent, speaker.parent)):
        was, own = json.dumps(name)[1:-1], json.dumps(_own(name, user))[1:-1]
        headers, body = headers.replace(was, own), body.replace(was, own)
    asked: Body = json.loads(body)
    _mark(asked, f"(I am user {user}.) ")
    return replace(row, trace=f"{row.trace}#{user}", headers=json.loads(headers), body=asked)


def _own(name: str, user: int) -> str:
    """Return an id of as many characters, unless it is very short: a UUID stays one."""
    digits = sha256(f"{user} {name}".encode()).hexdigest()[:OWN_DIGITS]
    return name[: max(0, len(name) - OWN_DIGITS)] + digits


def _mark(body: Body, text: str) -> None:
    """Put `text` in front of the last text of the first message that a user wrote."""
    first = next(_user_turns(body), None)
    if first is None:
        return
    if isinstance(first["content"], str):
        first["content"] = text + first["content"]
        return
    parts = [part for part in first["content"] if isinstance(part.get("text"), str)]
    if parts:
        parts[-1]["text"] = text + parts[-1]["text"]


def _user_turns(body: Body) -> Iterator[dict[str, Any]]:
    named = [body[name] for name in _TURNS if isinstance(body.get(name), list)]
    turns: list[dict[str, Any]] = named[0] if named else []
    return (turn for turn in turns if turn.get("role") == "user" and turn.get("content"))
