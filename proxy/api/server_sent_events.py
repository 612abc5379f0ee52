"""Writes server-sent events, with few imports: LiteLLM's process has them too."""

from typing import Any, Final

import orjson

SSE_DONE: Final = b"data: [DONE]\n\n"  # the end of OpenAI's streams


def sse_event(kind: str, data: dict[str, Any]) -> bytes:
    """Return one named event; the data repeats the event's type, as in the official APIs."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def sse_data(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
