"""Keeps the events of one response by their numbers, for clients that follow it when they like."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from hearth.proxy.api import server_sent_events as sse
from hearth.shared.errors import RequestError

LOG_BYTES_MAX: Final = 4 * 1024 * 1024  # of one response: some 20,000 tokens, an event each


class EventLog:
    """The events of one response, numbered from 0. Owner: the event loop.

    Invariant: the oldest go where there are more than LOG_BYTES_MAX, the newest never does; nothing
    is added after `end`.
    """

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._first = 0  # the number of the oldest that is kept
        self.nbytes = 0
        self._has_ended = False
        self._grown = asyncio.Event()  # set, and replaced, with each change

    @property
    def next_number(self) -> int:
        return self._first + len(self._frames)

    def add(self, frame: bytes) -> None:
        assert not self._has_ended, self.next_number
        self._frames.append(frame)
        self.nbytes += len(frame)
        while self.nbytes > LOG_BYTES_MAX and len(self._frames) > 1:
            self.nbytes -= len(self._frames.popleft())
            self._first += 1
        self._wake()

    def end(self) -> None:
        """Nothing follows: whoever follows is told so."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def check(self, after: int) -> None:
        """Raise RequestError where what follows the event `after` is not kept any more."""
        if after + 1 < self._first:
            raise RequestError(
                f"Events up to number {self._first - 1} of this response are not kept any more: "
                f"{LOG_BYTES_MAX // 2**20} MB of the newest are. Send starting_after="
                f"{self._first - 1} or higher, or ask for the response without stream.",
                code="events_not_kept",
                param="starting_after",
            )

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events behind number `after`, those to come too; comments where none comes.

        Raises: RequestError: the reader is so slow that some of them are gone.
        """
        at = after + 1
        while True:
            self.check(at - 1)
            if at < self.next_number:
                yield self._frames[at - self._first]
                at += 1
                continue
            if self._has_ended:
                return
            try:
                async with asyncio.timeout(sse.PING_S):
                    await self._grown.wait()
            except TimeoutError:
                yield sse.COMMENT
