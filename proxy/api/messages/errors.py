"""Tells errors in Anthropic's words, some of which its clients act on."""

import re
from typing import Any, Final

from hearth.proxy.api.answer_frames import sse_event
from hearth.proxy.api.error_texts import TOO_LONG, error_text
from hearth.shared.errors import Overloaded, RequestError

THREAD_UNSUPPORTED: Final = "thread_unsupported_request"  # Anthropic's word, which SDKs act on
_IMAGE_CODES: Final = ("image", "too_many_images")  # what the codes of images begin with
_IS_IMAGE: Final = re.compile(r"\S+ is (?:an |of type '?\w*)image")  # one that nobody here takes
_IMAGE_PLACE: Final = re.compile(
    r"messages\[(\d+)]\.content\[(\d+)](?:\.content\[(?P<inner>\d+)])?"
    r"(?!\.source\.content|\.content|\[)"  # of a document, of which nothing can be left out
)
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return what stands under "error" in Anthropic's answers and events."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    if error.code == Overloaded.CODE:
        kind = "overloaded_error"
    text = error_text(error)
    if error.code == TOO_LONG:
        text = f"prompt is too long: {text}"  # the words that Claude Code compacts on
    elif error.code.startswith(_IMAGE_CODES) or _IS_IMAGE.match(text):
        # The place as Anthropic says it, "" where the text does not begin with one: Claude Code
        # leaves out the image at such a place and goes on; without a place, the latest ones.
        place = ""
        if found := _IMAGE_PLACE.match(text):
            inner = f".tool_result.content.{found['inner']}" if found["inner"] else ""
            place = f"messages.{found[1]}.content.{found[2]}{inner}.image: "
        text = f"{place}Could not process image: {text}"
    fields: dict[str, Any] = {"type": _TYPES.get(error.status, kind), "message": text}
    if error.code == THREAD_UNSUPPORTED:
        fields["details"] = {"error_code": error.code}
    return fields


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return the body of an answer that failed before it began."""
    return {"type": "error", "error": anthropic_error(error), "request_id": request_id}


def error_event(error: RequestError) -> bytes:
    """Return what ends a stream that broke off."""
    return sse_event("error", {"error": anthropic_error(error)})
