"""Names messages by digests, so that a conversation is recognised although volatile fields change.

A message's name has two digests. The exact digest covers everything that a template may show to the
model. The canonical digest covers only the meaning (`hearth.proxy.request.volatile_fields` has the
rules). The link of a name chains the canonical digests of all messages up to its own. A
conversation has no other digest.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import orjson

from hearth.proxy.request.content_pieces import MessageContent, merge_texts, text_of
from hearth.proxy.request.volatile_fields import ASKING_ROLES, canonical_text
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.wire_messages import MessageName, linked

DIGEST_BYTES: Final = 16
REMEMBERED_MAX: Final = 32_768  # names kept, some 500 bytes each
SHRINK_SHARE_MAX: Final = 0.1  # largest share of text removed, if CACHE_NORM_SAFETY_CHECK is on


@dataclass(frozen=True, slots=True)
class _KnownMessage:
    """The name of a message, and its sizes."""

    name: MessageName  # without its link
    chars: int  # characters of the content's text
    delta_chars: int  # characters that the canonical form lacks


class MessageDigester:
    """Names messages, and remembers their names. Any thread.

    Names are remembered by owner, and no owner sees the names of another. The owner "" stands for
    all requests without an API key.
    Invariants: at most REMEMBERED_MAX names are remembered; apart from its link, a name depends on
    the message alone.
    """

    def __init__(self, is_on: bool, checks_size: bool) -> None:
        """With `checks_size`, a conversation that would lose too much text gets exact names."""
        self._is_on = is_on
        self._checks_size = checks_size
        # Kept for one key: digests of 32,768 messages
        self._known: MemoryByOwner[bytes, _KnownMessage] = MemoryByOwner(REMEMBERED_MAX)

    def names(self, messages: list[Any], owner: str = "") -> tuple[list[MessageName], int]:
        """Return a name for each of `messages`, and how many characters the canonical forms lack.

        The messages are those of a Prompt, and are not changed.
        """
        known_messages = [self._known_message(message, owner) for message in messages]
        delta = sum(known.delta_chars for known in known_messages)
        if self._checks_size and delta > SHRINK_SHARE_MAX * sum(
            known.chars for known in known_messages
        ):
            return linked(
                MessageName(known.name.exact, known.name.exact) for known in known_messages
            ), 0
        return linked(known.name for known in known_messages), delta

    def _known_message(self, message: dict[str, Any], owner: str) -> _KnownMessage:
        exact = exact_digest(message)
        known = self._known.get(owner, exact)
        if known is not None:
            return known
        content = merge_texts(message["content"])
        chars = len(text_of(content))
        if self._is_on:
            canonical_content: MessageContent
            if isinstance(content, list):
                canonical_content, rules = _canonical_parts(message["role"], content)
            elif (
                message["role"] == "assistant"
            ):  # clients may trim the ends of an answer, and change nothing else
                canonical_content, rules = content.strip(), []
            else:
                canonical_content, rules = canonical_text(message["role"], content)
            is_volatile = (
                not canonical_content and bool(content) and message["role"] in ASKING_ROLES
            )
            canonical = b"" if is_volatile else _canonical_digest(message, canonical_content)
            named = _KnownMessage(
                MessageName(canonical, exact, rules), chars, chars - len(text_of(canonical_content))
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
    return _digest([calls, *(message.get(name) for name in shown)], 0)


def _canonical_parts(role: str, parts: list[Any]) -> tuple[list[Any], list[str]]:
    """Return the canonical form of a content with images, and the rules that fired."""
    canonical_parts: list[Any] = []
    fired: dict[str, None] = {}
    for part in parts:
        if part["type"] != "text":
            canonical_parts.append(part)
            continue
        text, rules = canonical_text(role, part["text"])
        fired |= dict.fromkeys(rules)
        if text:
            canonical_parts.append({"type": "text", "text": text})
    return canonical_parts, list(fired)


def _canonical_digest(message: dict[str, Any], content: str | list[Any]) -> bytes:
    """Return a digest of the meaning of `message`, without ids, reasoning and argument order."""
    calls = [
        [call["function"]["name"], _as_javascript(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    meaning = [message["role"], content, calls, message.get("name"), message.get("tool_references")]
    return _digest(meaning, orjson.OPT_SORT_KEYS)


def _as_javascript(value: Any) -> Any:
    """Return `value` with the numbers of JavaScript: 5000.0 is 5000, and -0 is 0."""
    if type(value) is dict:
        return {name: _as_javascript(item) for name, item in value.items()}
    if type(value) is list:
        return [_as_javascript(item) for item in value]
    if type(value) in (int, float):
        return float(value) + 0.0
    return value


def _digest(value: Any, option: int) -> bytes:
    return blake2b(orjson.dumps(value, option=option), digest_size=DIGEST_BYTES).digest()
