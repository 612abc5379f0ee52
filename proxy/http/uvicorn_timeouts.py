"""Gives uvicorn's HTTP/1.1 the two limits that it lacks: how long a head and a reply may take.

Without them whoever opens connections and sends nothing, or a header's letter a minute, or never
reads a reply, holds them for ever, and CONNECTIONS_MAX such connections shut everybody else out.
"""

import asyncio
import logging
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

WRITE_WAIT_S_MAX: Final = 600.0  # for a client to take anything at all of what is sent to it
HEAD_WAIT_S_MAX: Final = 20.0  # from a connection's start, or a request's first byte, to its body


class HeadTimeout(H11Protocol):
    """Closes a connection whose request's head does not arrive in time. Owner: the event loop.

    One whose client has stopped reading is closed too; until then it holds uvicorn's write buffer
    and, behind that, what its answer holds. A connection kept alive between requests is uvicorn's
    to close (KEEP_ALIVE_S).
    """

    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_write_clock()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_write_clock()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._stop_write_clock()
        unsent_bytes = self.transport.get_write_buffer_size()
        self._write_deadline = self.loop.call_later(
            WRITE_WAIT_S_MAX, self._check_reader, unsent_bytes
        )

    def _check_reader(self, unsent_bytes: int) -> None:
        """Let go of a client that has taken nothing since there were so many bytes for it."""
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._await_reader()
        else:
            log.info("a client has read nothing for %g s: closed", WRITE_WAIT_S_MAX)
            self.transport.abort()

    def _stop_write_clock(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _await_head(self) -> None:
        """Start the clock, unless it runs: a byte now and then does not set it back."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_WAIT_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
