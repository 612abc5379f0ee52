"""Writes errors of Responses; only the error event of a stream has a form of its own."""

from hearth.proxy.api.chat_completions.errors import error_body, openai_error
from hearth.proxy.api.server_sent_events import sse_event
from hearth.shared.errors import RequestError

__all__ = ["error_body", "error_event"]


def error_event(error: RequestError) -> bytes:
    """Return the last event of a stream that another server began and that failed."""
    fields = openai_error(error)
    return sse_event("error", {name: fields[name] for name in ("code", "message", "param")})
