"""Writes errors in Anthropic's form. Clients act on some of the error texts."""

import re
from typing import Any, Final

from hearth.proxy.api.error_texts import TOO_LONG, error_text
from hearth.proxy.api.server_sent_events import sse_event
from hearth.shared.errors import Overloaded, RequestError

THREAD_UNSUPPORTED: Final = "thread_unsupported_request"  # Anthropic's code; SDKs act on it
_IMAGE_CODES: Final = ("image", "too_many_images")  # beginnings of the error codes about images
_IS_IMAGE: Final = re.compile(r"\S+ is (?:an |of type '?\w*)image")  # in texts about bad images
_IMAGE_PLACE: Final = re.compile(
    r"messages\[(\d+)]\.content\[(\d+)](?:\.content\[(?P<inner>\d+)])?"
    r"(?!\.source\.content|\.content|\[)"  # not inside a document: clients drop whole images only
)
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return the object under "error" in Anthropic's answers and events."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    if error.code == Overloaded.CODE:
        kind = "overloaded_error"
    text = error_text(error)
    if error.code == TOO_LONG:
        text = f"prompt is too long: {text}"  # Claude Code compacts at these words
    elif error.code.startswith(_IMAGE_CODES) or _IS_IMAGE.match(text):
        # The text may begin with the path of an image, in Anthropic's notation. Claude Code then
        # goes on without this image, or without the latest images if the text has no path.
        path = ""
        if match := _IMAGE_PLACE.match(text):
            inner = f".tool_result.content.{match['inner']}" if match["inner"] else ""
            path = f"messages.{match[1]}.content.{match[2]}{inner}.image: "
        text = f"{path}Could not process image: {text}"
    fields: dict[str, Any] = {"type": _TYPES.get(error.status, kind), "message": text}
    if error.code == THREAD_UNSUPPORTED:
        fields["details"] = {"error_code": error.code}
    return fields


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return the body of a response with an error status."""
    return {"type": "error", "error": anthropic_error(error), "request_id": request_id}


def error_event(error: RequestError) -> bytes:
    """Return the last event of a stream that failed."""
    return sse_event("error", {"error": anthropic_error(error)})
