"""Looks at a cloud's reply as it flows by, and finds the response object that it ends with.

Later requests may go on from it. Nothing is held up or changed, and what is no final response, or
is too large to be kept, gives none.
"""

from typing import Any, Final

import orjson

from hearth.proxy.api.responses.response_store import BYTES_MAX

_ENDS: Final = ("completed", "incomplete")  # of what can be gone on from
_END_MARKS: Final = tuple(f"response.{status}".encode() for status in _ENDS)
_EVENT_END: Final = b"\n\n"  # as LiteLLM writes it


class ReplyTap:
    """Reads one reply, in chunks that begin and end anywhere. Owner: the task that sends it on.

    Invariant: between chunks it holds at most BYTES_MAX of an event, or of a whole reply.
    """

    def __init__(self, dialect: str, *, is_stream: bool) -> None:
        """Of other dialects than Responses nothing is looked at."""
        self.held = bytearray()  # of the event that is not whole yet, or of the reply
        self._is_read = dialect == "responses"
        self._is_stream = is_stream

    def feed(self, chunk: bytes) -> dict[str, Any] | None:
        """Return the final response of a stream where `chunk` ends it."""
        events: list[bytearray] = []
        if self._is_read:
            self.held += chunk
            if self._is_stream and _EVENT_END in self.held:
                *events, self.held = self.held.split(_EVENT_END)
            if len(self.held) > BYTES_MAX:
                self.held.clear()  # what follows of it is neither an event nor JSON
        ends = (event for event in events if any(mark in event for mark in _END_MARKS))
        return next(filter(None, map(_final_of, ends)), None)

    def end(self) -> dict[str, Any] | None:
        """Return the response that a whole reply is, at its end; None where it is none to keep."""
        return None if self._is_stream else _final_of(b"data:" + self.held)


def _final_of(event: bytes | bytearray) -> dict[str, Any] | None:
    try:
        row = orjson.loads(event.partition(b"data:")[2])
    except orjson.JSONDecodeError:
        return None
    found = row.get("response", row) if type(row) is dict else None
    return found if type(found) is dict and found.get("status") in _ENDS else None
