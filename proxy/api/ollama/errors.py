"""Writes errors as Ollama does, with their text alone."""

from typing import Any

import orjson

from hearth.proxy.api.error_texts import error_text
from hearth.shared.errors import RequestError


def error_body(error: RequestError, _request_id: str) -> dict[str, Any]:
    """Return the body of a response with an error status."""
    return {"error": error_text(error)}


def error_event(error: RequestError) -> bytes:
    """Return the last line of a stream that failed."""
    return orjson.dumps({"error": str(error)}) + b"\n"
