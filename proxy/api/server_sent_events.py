"""Encodes server-sent events, and says how often a silent stream shows that it is alive."""

from typing import Any, Final

import orjson

PING_S: Final = 5.0  # of silence: a client that counts 10 s sees one late event in between
DONE: Final = b"data: [DONE]\n\n"  # the end of OpenAI's streams


def event(kind: str, data: dict[str, Any]) -> bytes:
    """Return one named event, its type repeated in the data as the official APIs do."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def data(row: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(row) + b"\n\n"
