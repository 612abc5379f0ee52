"""Answers what operators ask about sessions and recent prompts."""

from typing import Any

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Status
from hearth.worker.requests.debug_prompt_log import RecentPrompts
from hearth.worker.sessions.session_manager import SessionManager


def session_report(
    message: Status, sessions: SessionManager, recent: RecentPrompts
) -> dict[str, Any]:
    """Return the body of the answer to `message`. Prompt thread.

    Raises:
        RequestError: the session or the prompt is unknown, or another key's.
    """
    if message.what == "sessions":
        return {"sessions": sessions.reports.sessions(message.key)}
    body: dict[str, Any] | None
    if message.what in ("session", "tree"):
        is_brief = message.what == "tree"
        report = sessions.reports.brief if is_brief else sessions.reports.session
        body = report(message.about, message.key)
        text = f"No session {message.about!r:.80} is remembered by this worker."
    else:
        ids = recent.ids_of(message.about, message.key)
        body = {"ids": ids} if ids is not None else None
        text = f"No prompt of request {message.about!r:.80} is remembered by this worker."
    if body is None:
        raise RequestError(text, status=404, code="not_found")
    return body
