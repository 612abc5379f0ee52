"""Tells errors as Ollama does: by their text alone."""

from typing import Any

import orjson

from hearth.proxy.api.error_texts import error_text
from hearth.shared.errors import RequestError


def error_body(error: RequestError, _request_id: str) -> dict[str, Any]:
    """Return the body of an answer that failed before it began."""
    return {"error": error_text(error)}


def error_event(error: RequestError) -> bytes:
    """Return the line that ends a stream that broke off."""
    return orjson.dumps({"error": str(error)}) + b"\n"
