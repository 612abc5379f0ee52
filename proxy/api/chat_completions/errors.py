"""Writes errors in the form of all of OpenAI's dialects."""

from typing import Any, Final

from hearth.proxy.api.error_texts import TOO_LONG, error_text
from hearth.proxy.api.server_sent_events import sse_data
from hearth.shared.errors import RequestError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return the object under "error" in OpenAI's answers and streams."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "message": error_text(error),
        "type": _TYPES.get(error.status, kind),
        "param": error.param or ("messages" if error.code == TOO_LONG else None),
        "code": error.code,
    }


def error_body(error: RequestError, _request_id: str) -> dict[str, Any]:
    """Return the body of a response with an error status."""
    return {"error": openai_error(error)}


def error_event(error: RequestError) -> bytes:
    """Return the last event of a stream that failed."""
    return sse_data({"error": openai_error(error)})
