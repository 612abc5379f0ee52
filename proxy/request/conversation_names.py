"""Names the conversations that no client names: by their first question, or by how they open.

A parsed request's messages have names; a body that is passed through is read as it came.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import orjson

from hearth.proxy.request.session_id import session_of
from hearth.shared.wire_messages import MessageName, Speaker

CONVERSATION_DIGITS: Final = 8
OPENING_MESSAGES_MAX: Final = 8  # that stand before the first question, and with it


def conversation_of(
    speaker: Speaker, messages: Sequence[Mapping[str, Any]], names: Sequence[MessageName]
) -> str:
    """Return what a conversation without an id is told by: its client and its first question.

    It is the same for each of its requests and after a restart. "" where the client names the
    session, or nothing of the question is stable.
    """
    if speaker.session:
        return ""
    asked = (name for row, name in zip(messages, names, strict=False) if row["role"] == "user")
    first = next((name.canonical for name in asked if name.canonical), b"")
    digits = first.hex()[:CONVERSATION_DIGITS]
    return f"{speaker.client or 'client'}-{digits}" if digits else ""


def session_digest(key: str, group: str, headers: Mapping[str, str], body: dict[str, Any]) -> bytes:
    """Return what the session of a request is known by; `key` is the digest of its API key."""
    speaker = session_of(headers, body, key)
    name: Any = [speaker.session, speaker.agent] if speaker.session else _opening(body)
    return blake2b(orjson.dumps([key, group, name]), digest_size=16).digest()


def _opening(body: dict[str, Any]) -> list[Any]:
    """Return what every later turn of the conversation has too: all up to its first question.

    A text may be a string in one turn and a part in the next, with a mark for a provider's cache.
    """
    rows = body.get("messages", body.get("input", body.get("prompt")))
    opening = [_texts(body.get("system")), _texts(body.get("instructions"))]
    if not isinstance(rows, list):
        rows = [{"role": "user", "content": rows}]
    for row in rows[:OPENING_MESSAGES_MAX]:
        role = row.get("role") if isinstance(row, dict) else None
        opening.append([row] if role is None else [role, *_texts(row.get("content"))])
        if role == "user":
            break
    return opening


def _texts(content: Any) -> list[Any]:
    parts = content if isinstance(content, list) else [content]
    return [_text(part) for part in parts]


def _text(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("text"), str):
        return part["text"]
    return {name: value for name, value in part.items() if name != "cache_control"}
