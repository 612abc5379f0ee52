"""Looks at a cloud's reply as it flows by, and keeps the response object that it ends with.

Later requests may go on from it. Nothing is held up or changed, and what is no final response, or
is too large to be kept, gives none.
"""

from typing import Any, Final

import orjson

from hearth.proxy.api.responses.response_store import BYTES_MAX

_ENDS: Final = ("completed", "incomplete")  # of what can be gone on from
_END_EVENTS: Final = tuple(f"response.{status}" for status in _ENDS)
_END_MARKS: Final = tuple(name.encode() for name in _END_EVENTS)


class ReplyTap:
    """Reads one reply, in chunks that begin and end anywhere. Owner: the task that sends it on.

    Invariant: it holds at most BYTES_MAX of an event, or of a whole reply, and one response.
    """

    def __init__(self, dialect: str, *, is_stream: bool) -> None:
        """Of other dialects than Responses nothing is kept."""
        self._is_read = dialect == "responses"
        self._is_stream = is_stream
        self._parts: list[bytes] = []  # of the line that is not whole yet, or of the reply
        self._data: list[bytes] = []  # lines of the event's data
        self.size = 0  # of both
        self._final: dict[str, Any] | None = None  # what a stream ended with

    def feed(self, chunk: bytes) -> None:
        if not self._is_read:
            return
        if not self._is_stream:
            self._hold(self._parts, chunk)
            return
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._hold(self._parts, end)
            line = b"".join(self._parts).removesuffix(b"\r")
            self._parts.clear()
            self._line(line)
        self._hold(self._parts, rest)

    def taken(self) -> dict[str, Any] | None:
        """Return the final response of a stream, once; None before it, and where there is none."""
        final, self._final = self._final, None
        return final

    def end(self) -> dict[str, Any] | None:
        """Return the response that a whole reply is, at its end; None where it is none to keep."""
        if self._is_stream or not self._is_read or self.size > BYTES_MAX:
            return None
        return _final_of(_json(b"".join(self._parts)))

    def _hold(self, parts: list[bytes], piece: bytes) -> None:
        self.size += len(piece)
        if self.size <= BYTES_MAX:
            parts.append(piece)

    def _line(self, line: bytes) -> None:
        if not line:
            if self.size <= BYTES_MAX:
                self._event(b"\n".join(self._data))
            self._data.clear()
            self.size = 0
        elif line.startswith(b"data:"):
            self._data.append(line[5:])

    def _event(self, data: bytes) -> None:
        if any(mark in data for mark in _END_MARKS):
            event = _json(data)
            if type(event) is dict and event.get("type") in _END_EVENTS:
                self._final = _final_of(event.get("response"))


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _final_of(value: Any) -> dict[str, Any] | None:
    return value if type(value) is dict and value.get("status") in _ENDS else None
