"""Names the session of each request that passes a LiteLLM proxy: its turns then meet one Hearth.

LiteLLM's `session_affinity` pins by `x-litellm-session-id` and by the ids that Claude Code, Codex
and opencode send. Other agents name their session elsewhere, or nowhere: what they send first is
the same in all their turns. Copy this file beside the proxy's config, which has
`litellm_settings: {callbacks: [hearth_sessions.handler]}`. It needs nothing but LiteLLM.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from litellm.integrations.custom_logger import CustomLogger

HEADERS: Final = ("x-session-id", "session-id", "session_id", "thread-id")
FIELDS: Final = ("prompt_cache_key", "session_id", "conversation_id", "thread_id", "chat_id")
NAME_DIGITS: Final = 32
_OWN: Final = "litellm_metadata"  # where LiteLLM keeps its own when a body may have `metadata`
# What agents put into a question in one turn and leave out in the next.
_REMINDER: Final = ("<system-reminder>", "</system-reminder>")


class HearthSessions(CustomLogger):
    """Gives a session to requests that have none by LiteLLM's own rules. It keeps nothing."""

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        if isinstance(passed_on := data.get("headers"), dict):
            data["headers"] = _sendable(passed_on)
        metadata = data[_OWN] if isinstance(data.get(_OWN), dict) else data.get("metadata")
        if isinstance(metadata, dict) and not metadata.get("session_id"):
            request = data.get("proxy_server_request") or {}
            if name := session_name(request.get("headers") or {}, data):
                metadata["session_id"] = name
        return data


def _sendable(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that LiteLLM's HTTP client can send: a value that is not ASCII ends a
    request with a 500 there, for which the Hearth that never saw it is passed over."""
    return {name: value for name, value in headers.items() if str(value).isascii()}


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return what the session of a request is known by; "" where nothing tells it from others.

    Texts are digested: a name is seen in Redis and in logs.
    """
    told = next(_told(headers, body), "")
    known = ["id", told] if told else ["question", first_question(body)]
    if not known[1]:
        return ""
    return "hearth-" + hashlib.sha256(json.dumps(known).encode()).hexdigest()[:NAME_DIGITS]


def _told(headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the session's names that the client itself gives."""
    lower = {name.lower(): value for name, value in headers.items()}
    yield from filter(None, (_text(lower.get(name)) for name in HEADERS))
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and (session := _user_session(metadata.get("user_id"))):
        yield session
    yield from filter(None, (_text(body.get(name)) for name in FIELDS))


def _user_session(user_id: Any) -> str:
    """Return the session in Claude Code's `metadata.user_id`, which is JSON in a text."""
    try:
        row = json.loads(user_id)
    except (TypeError, ValueError, RecursionError):
        return ""
    return _text(row.get("session_id")) if isinstance(row, dict) else ""


def first_question(body: Mapping[str, Any]) -> str:
    """Return what a user asked first: the same in every turn, whatever else an agent rewrites."""
    rows = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), ())
    if isinstance(rows, str):
        return rows.strip()
    rows = rows if isinstance(rows, list) else []
    questions = (row for row in rows if isinstance(row, dict) and row.get("role") == "user")
    texts = (_without_reminders(_content(row.get("content"))) for row in questions)
    return next(filter(None, texts), "")


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(_text(part.get("text")) for part in parts if isinstance(part, dict))


def _without_reminders(text: str) -> str:
    head, *rest = text.split(_REMINDER[0])
    return "".join([head, *(each.partition(_REMINDER[1])[2] for each in rest)]).strip()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


handler: Final = HearthSessions()
