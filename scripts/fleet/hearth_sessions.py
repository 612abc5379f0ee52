"""Names the session of each request that passes a LiteLLM proxy: its turns then meet one Hearth.

LiteLLM's `session_affinity` pins by `x-litellm-session-id` and by the ids that Claude Code, Codex
and opencode send. Other agents name their session elsewhere, or nowhere: what they send first is
the same in all their turns. Copy this file beside the proxy's config, which has
`litellm_settings: {callbacks: [hearth_sessions.handler]}`. It needs nothing but LiteLLM.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from litellm.integrations.custom_logger import CustomLogger

HEADERS: Final = ("x-session-id", "session-id", "session_id", "thread-id")
FIELDS: Final = ("prompt_cache_key", "session_id", "conversation_id", "thread_id", "chat_id")
NAME_DIGITS: Final = 32
_OWN: Final = "litellm_metadata"  # where LiteLLM keeps its own when a body may have `metadata`
# What agents put into a question in one turn and leave out in the next.
_REMINDER: Final = re.compile(r"<system-reminder>.*?(?:</system-reminder>|\Z)", re.DOTALL)


class HearthSessions(CustomLogger):
    """Gives a session to requests that have none by LiteLLM's own rules. It keeps nothing."""

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        if isinstance(passed_on := data.get("headers"), dict):
            # LiteLLM's HTTP client sends no value that is not ASCII: the request ends with a 500
            # there, for which the Hearth that never saw it is passed over.
            data["headers"] = {n: value for n, value in passed_on.items() if str(value).isascii()}
        metadata = data[_OWN] if isinstance(data.get(_OWN), dict) else data.get("metadata")
        if isinstance(metadata, dict) and not metadata.get("session_id"):
            request = data.get("proxy_server_request") or {}
            if name := session_name(request.get("headers") or {}, data):
                metadata["session_id"] = name
        return data


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return what the session of a request is known by; "" where nothing tells it from others.

    Texts are digested: a name is seen in Redis and in logs.
    """
    told = next(filter(None, _told(headers, body)), "")
    known = ["id", told] if told else ["question", first_question(body)]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:NAME_DIGITS]
    return f"hearth-{digest}" if known[1] else ""


def _told(headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the session's names that the client itself gives, and "" for those that it does not."""
    lower = {name.lower(): value for name, value in headers.items()}
    yield from (_text(lower.get(name)) for name in HEADERS)
    with contextlib.suppress(TypeError, ValueError, LookupError, RecursionError):
        yield _text(json.loads(body["metadata"]["user_id"])["session_id"])  # of Claude Code
    yield from (_text(body.get(name)) for name in FIELDS)


def first_question(body: Mapping[str, Any]) -> str:
    """Return what a user asked first: the same in every turn, whatever else an agent rewrites."""
    rows = next((body[name] for name in ("messages", "input", "prompt") if body.get(name)), ())
    if isinstance(rows, str):
        return rows.strip()
    said = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    questions = (_content(row.get("content")) for row in said if row.get("role") == "user")
    return next(filter(None, (_REMINDER.sub("", text).strip() for text in questions)), "")


def _content(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(_text(part.get("text")) for part in parts if isinstance(part, dict))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


handler: Final = HearthSessions()
