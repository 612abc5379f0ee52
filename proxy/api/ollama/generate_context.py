"""Encodes the conversation of /api/generate as the numbers that its clients send back.

Ollama's `context` is token ids, which only the worker knows. Clients take it for what it is called,
an encoding of the conversation: here it is the JSON of the messages, three bytes a number.
"""

import contextlib
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.request.content_pieces import text_of
from hearth.shared.errors import RequestError

BYTES_MAX: Final = 256 * 1024  # of JSON: encoding it takes the event loop some ms
_BYTES: Final = 3  # in one number, which every client can hold
_ROLES: Final = ("system", "user", "assistant")


def context_of(messages: list[Any], answer: str) -> list[int]:
    """Return the encoding of `messages` and the answer to them; [] where they are too long.

    Images are left out.
    """
    rows = [[row["role"], text_of(row["content"])] for row in messages]
    octets = orjson.dumps([*rows, ["assistant", answer]])
    if len(octets) > BYTES_MAX:
        return []
    octets += b" " * (-len(octets) % _BYTES)
    starts = range(0, len(octets), _BYTES)
    return [int.from_bytes(octets[start : start + _BYTES], "big") for start in starts]


def messages_of(context: Any) -> list[dict[str, Any]]:
    """Return the messages in a `context` of ours; none where there is none.

    Raises:
        RequestError: it is another server's.
    """
    if not context:
        return []
    numbers = fields.rows(context, "context")
    if len(numbers) * _BYTES <= BYTES_MAX + _BYTES:
        with contextlib.suppress(AttributeError, OverflowError, TypeError, ValueError):
            octets = b"".join(number.to_bytes(_BYTES, "big") for number in numbers)
            messages = [{"role": role, "content": text} for role, text in orjson.loads(octets)]
            if all(row["role"] in _ROLES and type(row["content"]) is str for row in messages):
                return messages
    raise RequestError(
        "context is not what this server has answered: it holds a conversation, not the tokens of "
        "a model. Leave it out, or send the messages to /api/chat.",
        code="invalid_context",
        param="context",
    )
