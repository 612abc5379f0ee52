"""Turns a RequestError into the body and headers that each API answers with."""

import re
from typing import Any, Final

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.request.parsed_request import OLLAMA_DIALECTS, Dialect
from hearth.shared.errors import Overloaded, RequestError

THREAD_UNSUPPORTED: Final = "thread_unsupported_request"  # Anthropic's word, which SDKs act on
TOO_LONG: Final = "context_length_exceeded"
# llama.cpp's words, by which a LiteLLM in front of several servers knows such a prompt, and agents
# behind one, which are told no code then.
TOO_LONG_WORDS: Final = "exceeds the available context size"
_IMAGE_CODES: Final = ("image", "too_many_images")  # what the codes of images begin with
_IS_IMAGE: Final = re.compile(r"\S+ is (?:an |of type '?\w*)image")  # one that nobody here takes
_IMAGE_PLACE: Final = re.compile(
    r"messages\[(\d+)]\.content\[(\d+)](?:\.content\[(?P<inner>\d+)])?"
    r"(?!\.source\.content|\.content|\[)"  # of a document, of which nothing can be left out
)
_OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return what stands under "error" in OpenAI's answers and streams."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "message": _text(error),
        "type": _OPENAI_TYPES.get(error.status, kind),
        "param": error.param or ("messages" if error.code == TOO_LONG else None),
        "code": error.code,
    }


def _text(error: RequestError) -> str:
    """Return what people and programs are told."""
    text = str(error)
    if error.code != TOO_LONG or TOO_LONG_WORDS in text:
        return text
    return f"{text} The prompt {TOO_LONG_WORDS} here."


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return what stands under "error" in Anthropic's answers and events."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    if error.code == Overloaded.CODE:
        kind = "overloaded_error"
    text = _text(error)
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
    fields: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(error.status, kind), "message": text}
    if error.code == THREAD_UNSUPPORTED:
        fields["details"] = {"error_code": error.code}
    return fields


def error_body(error: RequestError, dialect: Dialect, request_id: str) -> dict[str, Any]:
    """Return the body of an answer that failed before it began."""
    if dialect == "messages":
        return {"type": "error", "error": anthropic_error(error), "request_id": request_id}
    if dialect in OLLAMA_DIALECTS:
        return {"error": _text(error)}
    return {"error": openai_error(error)}


def error_event(error: RequestError, dialect: str) -> bytes:
    """Return what ends a stream of `dialect` that another server began and that broke off."""
    if dialect == "messages":
        return sse.event("error", {"error": anthropic_error(error)})
    fields = openai_error(error)
    if dialect == "responses":
        return sse.event("error", {name: fields[name] for name in ("code", "message", "param")})
    return sse.data({"error": fields})


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    after_s = error.retry_after_s or (Overloaded.RETRY_AFTER_S if error.status == 503 else 0)
    if error.status in (429, 503) and after_s:
        return [(b"retry-after", b"%d" % after_s)]
    return [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
