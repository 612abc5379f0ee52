"""Remembers the token ids of recent prompts, for LOG_PROMPTS."""

from typing import Final

from hearth.shared.wire_messages import Submit

RECENT_MAX: Final = 64  # prompts whose ids are remembered


class RecentPrompts:
    """Keeps the newest prompts by request id. The prompt threads share it.

    Invariant: it holds at most `RECENT_MAX`, and none unless `is_on` (LOG_PROMPTS, and a key).
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        # Kept for one key: tokens of 64 prompts (`LOG_PROMPTS`)
        self._by_request: dict[str, tuple[str, list[int]]] = {}  # request id -> key digest, ids

    def add(self, message: Submit, ids: list[int]) -> None:
        """Remember a prompt, unless its client wants nothing of it kept."""
        if not (self._is_on and message.use_kv_cache):
            return
        self._by_request[message.request_id] = (message.prompt.speaker.key, ids)
        while len(self._by_request) > RECENT_MAX:
            self._by_request.pop(next(iter(self._by_request)), None)  # or another thread did

    def ids_of(self, request_id: str, key: str) -> list[int] | None:
        """Return a prompt's ids, for the API key that sent it; "" = any key. None if unknown."""
        owner, ids = self._by_request.get(request_id, ("", None))
        return ids if key in ("", owner) else None
