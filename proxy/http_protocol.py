"""uvicorn's HTTP/1.1 with the one limit that it lacks: how long a request's head may take.

Without it whoever opens connections and sends nothing, or a header's letter a minute, holds them
for ever, and CONNECTIONS_MAX such connections shut everybody else out.
"""

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_WAIT_S_MAX: Final = 20.0  # from a connection's start, or a request's first byte, to its body


class HeadTimeout(H11Protocol):
    """Closes a connection whose request's head does not arrive in time. Owner: the event loop.

    A connection kept alive between requests is uvicorn's to close (KEEP_ALIVE_S).
    """

    _deadline: asyncio.TimerHandle | None = None

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
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """Start the clock, unless it runs: a byte now and then does not set it back."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_WAIT_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
