"""Finds the session that a request belongs to, in its headers or its body, and digests its key.

Nothing here is trusted: it groups conversations, and whoever forges it groups its own.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from hearth.proxy.http.strict_json import parse_argument
from hearth.proxy.request.client_name import CLAUDE_CODE_HEADER, client_of
from hearth.shared.wire_messages import Speaker

VALUE_CHARS_MAX: Final = 256
KEY_DIGITS: Final = 16
USER_ID_CHARS_MAX: Final = 4_096  # of a metadata.user_id, which holds more than the session

# A session's header, its agent's, and its parent's, of which the first that is there counts.
_HEADERS: Final = (
    (CLAUDE_CODE_HEADER, "x-claude-code-agent-id", ()),
    ("x-session-id", "", ("x-parent-session-id",)),
    # Codex: the thread is a sub-agent's own, the session is its main thread's in all of them.
    ("thread-id", "", ("x-codex-parent-thread-id", "session-id")),
    ("session-id", "", ("x-codex-parent-thread-id",)),
    ("session_id", "", ("x-codex-parent-thread-id",)),
)
_FIELDS: Final = ("prompt_cache_key", "session_id", "conversation_id", "thread_id", "chat_id")
_USER_SESSION: Final = "_session_"  # in Claude Code's older user ids, before a UUID
_UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def key_digest(headers: Mapping[str, str]) -> str:
    """Return what the API key of a request is known by, "" = it is everybody's.

    `headers`, in lower case here and below, are those that `HearthApp` has put the key into.
    """
    key = headers.get("x-api-key", "")
    return sha256(key.encode()).hexdigest()[:KEY_DIGITS] if key else ""


def session_of(headers: Mapping[str, str], body: Mapping[str, Any], key: str) -> Speaker:
    """Return who sent a request, as far as it tells. Never raises; `key` is `key_digest`'s."""
    client = client_of(headers)
    names = {"client": client.word, "client_name": client.text}
    for session_header, agent_header, parent_headers in _HEADERS:
        if session := _name(headers.get(session_header)):
            parents = [_name(headers.get(header)) for header in parent_headers]
            parent = next((name for name in parents if name), "")
            agent = _name(headers.get(agent_header))
            return Speaker(key, session, agent, parent if parent != session else "", **names)
    # The session's names in `body`, the most telling first.
    nested = [row for row in (body.get("metadata"), body.get("extra_body")) if type(row) is dict]
    users = [_user_session(row.get("user_id")) for row in nested]
    told = [_name(place.get(field)) for field in _FIELDS for place in (body, *nested)]
    return Speaker(key, next(filter(None, users + told), ""), **names)


def _user_session(user_id: Any) -> str:
    """Return the session in Messages' metadata.user_id; a user's id alone is none."""
    if type(user_id) is not str or len(user_id) > USER_ID_CHARS_MAX:
        return ""
    row = parse_argument(user_id)
    if row is not None:
        return _name(row.get("session_id"))
    _, found, last = user_id.rpartition(_USER_SESSION)
    return _name(last) if found and _UUID.fullmatch(last) else ""


def _name(value: Any) -> str:
    """Return `value` where it can name something: a short text that can be printed, a number."""
    if type(value) is int and value.bit_length() <= 64:
        return str(value)
    if type(value) is not str or not 0 < len(value) <= VALUE_CHARS_MAX:
        return ""
    return value if value.isprintable() and not value.isspace() else ""
