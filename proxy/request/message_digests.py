"""Names messages by digests, so that a conversation is recognised although volatile fields change.

A name has two digests: the exact one is of all that a template may show to the model, the
canonical one of what the message means (`hearth.proxy.request.volatile_fields` has the rules). Its
link chains the canonical ones: nobody makes another digest of a conversation.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import orjson

from hearth.proxy.request.content_pieces import MessageContent, merged, text_of
from hearth.proxy.request.volatile_fields import ASKING_ROLES, canonical_text
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.wire_messages import MessageName, linked

DIGEST_BYTES: Final = 16
REMEMBERED_MAX: Final = 32_768  # messages whose names are kept, some 500 bytes each
SHRINK_SHARE_MAX: Final = 0.1  # of a conversation's characters, where CACHE_NORM_SAFETY_CHECK is on


@dataclass(frozen=True, slots=True)
class _KnownMessage:
    """A message that was named before."""

    name: MessageName  # without its link
    chars: int  # of the content's text
    delta_chars: int  # that its canonical form has fewer


class MessageDigester:
    """Names messages, and remembers the names of those it has seen. Any thread.

    What is remembered for one owner, "" being everybody, serves no other.
    Invariant: at most REMEMBERED_MAX are remembered; but for its link, a name depends on the
    message alone.
    """

    def __init__(self, is_on: bool, checks_size: bool) -> None:
        """With `checks_size` a conversation that would lose too much is known by its exact text."""
        self._is_on = is_on
        self._checks_size = checks_size
        # Kept for one key: digests of 32,768 messages
        self._known: MemoryByOwner[bytes, _KnownMessage] = MemoryByOwner(REMEMBERED_MAX)

    def names(self, messages: list[Any], owner: str = "") -> tuple[list[MessageName], int]:
        """Return a name for each of `messages`, and the characters that the canonical forms lack.

        The messages are as a dialect makes them, and stay as they are.
        """
        rows = [self._named(message, owner) for message in messages]
        delta = sum(row.delta_chars for row in rows)
        if self._checks_size and delta > SHRINK_SHARE_MAX * sum(row.chars for row in rows):
            return linked(MessageName(row.name.exact, row.name.exact) for row in rows), 0
        return linked(row.name for row in rows), delta

    def _named(self, message: dict[str, Any], owner: str) -> _KnownMessage:
        exact = exact_digest(message)
        known = self._known.get(owner, exact)
        if known is not None:
            return known
        content = merged(message["content"])
        chars = len(text_of(content))
        if self._is_on:
            left: MessageContent
            if isinstance(content, list):
                left, rules = _canonical_parts(message["role"], content)
            elif message["role"] == "assistant":  # clients trim what it said, at its ends only
                left, rules = content.strip(), []
            else:
                left, rules = canonical_text(message["role"], content)
            is_volatile = not left and bool(content) and message["role"] in ASKING_ROLES
            canonical = b"" if is_volatile else _canonical_digest(message, left)
            named = _KnownMessage(
                MessageName(canonical, exact, rules), chars, chars - len(text_of(left))
            )
        else:
            named = _KnownMessage(MessageName(exact, exact), chars, 0)
        assert named.delta_chars >= 0, (named.delta_chars, named.name.rules)
        self._known.put(owner, exact, named)
        return named


def exact_digest(message: dict[str, Any]) -> bytes:
    """Return a digest of everything in `message` that a template may show to the model."""
    calls = [
        [call["id"], call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    shown = ("role", "content", "reasoning_content", "tool_call_id", "name", "tool_references")
    return _digest([calls, *(message.get(key) for key in shown)], 0)


def _canonical_parts(role: str, parts: list[Any]) -> tuple[list[Any], list[str]]:
    """Return a content that shows images as it is known: its texts by the rules, images as is."""
    left: list[Any] = []
    fired: dict[str, None] = {}
    for part in parts:
        if part["type"] != "text":
            left.append(part)
            continue
        text, rules = canonical_text(role, part["text"])
        fired |= dict.fromkeys(rules)
        if text:
            left.append({"type": "text", "text": text})
    return left, list(fired)


def _canonical_digest(message: dict[str, Any], content: str | list[Any]) -> bytes:
    """Return a digest of what `message` means: no ids, no reasoning, arguments in no order."""
    calls = [
        [call["function"]["name"], _as_javascript(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    meaning = [message["role"], content, calls, message.get("name"), message.get("tool_references")]
    return _digest(meaning, orjson.OPT_SORT_KEYS)


def _as_javascript(value: Any) -> Any:
    """Return `value` with its numbers as JavaScript has them, where 5000.0 is 5000 and -0 is 0."""
    if type(value) is dict:
        return {key: _as_javascript(item) for key, item in value.items()}
    if type(value) is list:
        return [_as_javascript(item) for item in value]
    if type(value) in (int, float):
        return float(value) + 0.0
    return value


def _digest(value: Any, option: int) -> bytes:
    return blake2b(orjson.dumps(value, option=option), digest_size=DIGEST_BYTES).digest()
