"""An answer while it arrives: what a worker sent for one request, until its client takes it."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from proxy.failures import refused
from shared.errors import RequestError, WorkerLost
from shared.wire import Admitted, Delta, Failed, Finished, Progress, Usage

ADMIT_WAIT_S_MAX = 120.0  # rendering a full queue of the longest prompts takes a minute
PLAN_WAIT_S_MAX = 0.25  # an idle worker's takes a millisecond
PACE_S = 0.015  # between two deltas of one answer: 66 a second look as smooth as any


class ClientGone(RequestError):
    """Nobody is left to read the answer."""

    def __init__(self) -> None:
        super().__init__("The client is gone.", status=499, code="client_closed")


class Answer:
    """One request's events, from Submit to its one Finished or Failed.

    Invariant: after `_ended` is set nothing is added, and `_release` has been called exactly once.
    Owner: the event loop. `take` and `close` never block.
    """

    def __init__(self, request_id: str, release: Callable[[bool], None], key: str = "") -> None:
        """`release(cancel)` forgets this answer at its link, and cancels it at the worker.

        `key` is the digest of the API key that it is for.
        """
        self.request_id = request_id
        self.key = key
        self.asked_at = time.monotonic()
        self.prompt_tokens = 0
        self.cached_tokens = 0  # when the model took it; `usage` has what was then used
        self.done_tokens = 0  # of the prompt, while it prefills
        self.signature = ""  # of its thinking, once it is admitted
        self.is_admitted = False
        self._is_planned = False  # the model has taken it and says what is kept of it
        self.ended_as = ""  # a finish reason, or a failure's code
        self.usage: Usage | None = None  # once the worker has told it
        self._release = release
        self._inbox: deque[Delta | Finished | RequestError] = deque()
        self._wake = asyncio.Event()
        self._over = asyncio.Event()  # set with _ended
        self._given_at = 0.0  # when the last delta was given out
        self._ended = False
        self._next_seq = 0

    def take(self, message: Admitted | Progress | Delta | Finished | Failed) -> None:
        """Accept the worker's next message about this request."""
        if self._ended:
            return
        if isinstance(message, Admitted):
            self.is_admitted = True
            self.prompt_tokens = message.prompt_tokens
            self.signature = message.signature
        elif isinstance(message, Progress):
            if not self._is_planned:
                self._is_planned = True
                self.cached_tokens = message.done_tokens
            self.done_tokens = message.done_tokens
        elif isinstance(message, Delta):
            self._take_delta(message)
        elif isinstance(message, Finished):
            self._take_finished(message)
        else:
            self._end(refused(message))
        self._wake.set()

    def _take_delta(self, delta: Delta) -> None:
        if delta.seq != self._next_seq:
            text = f"Part {self._next_seq} of the answer was lost on its way from the worker."
            self._end(WorkerLost(text), cancel=True)
            return
        self._next_seq += 1
        self._inbox.append(delta)

    def _take_finished(self, finished: Finished) -> None:
        self.usage = finished.usage
        if finished.reason == "cancelled":
            self._end(WorkerLost("The worker took this request for abandoned; send it again."))
        else:
            self._end(finished)

    def fail(self, error: RequestError) -> None:
        """End with `error`: the worker is gone, or this server stops."""
        if not self._ended:
            self._end(error)

    def close(self) -> None:
        if not self._ended:
            self._inbox.clear()
            self._end(ClientGone(), cancel=True)

    def _end(self, last: Finished | RequestError, *, cancel: bool = False) -> None:
        assert not self._ended, self.request_id
        self._ended = True
        self._over.set()
        self.ended_as = last.reason if isinstance(last, Finished) else last.code
        self._inbox.append(last)
        self._release(cancel)
        self._wake.set()

    async def admitted(self) -> None:
        """Wait until the worker has accepted the request.

        Raises:
            RequestError: it refused, is gone, or has not said a word for ADMIT_WAIT_S_MAX.
        """
        try:
            async with asyncio.timeout(ADMIT_WAIT_S_MAX):
                while not (self.is_admitted or self._inbox):
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            text = f"The worker has not taken this request within {ADMIT_WAIT_S_MAX:g} s."
            raise RequestError(text, status=503, code="worker_unavailable") from None
        if not self.is_admitted and isinstance(self._inbox[0], RequestError):
            raise self._inbox[0]

    async def planned(self) -> None:
        """Wait a moment for what is kept of the prompt: a busy model looks at it after its chunk.

        Raises nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PLAN_WAIT_S_MAX):
                while not (self._is_planned or self._inbox):
                    self._wake.clear()
                    await self._wake.wait()

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s if not self._inbox else None):
                while not self._inbox:
                    self._wake.clear()
                    await self._wake.wait()
        if not self._inbox:
            return None
        await self._pace()
        first = self._inbox.popleft()
        if isinstance(first, RequestError):
            self._inbox.append(first)  # whoever asks again is told again
            raise first
        if isinstance(first, Finished):
            return first
        self._given_at = time.monotonic()
        return self._merged(first)

    async def _pace(self) -> None:
        """Let deltas gather until PACE_S after the last one; neither a first nor an end waits.

        A chunk costs LiteLLM half a millisecond of CPU, which a fast model's every token would pay.
        """
        left_s = self._given_at + PACE_S - time.monotonic()
        if left_s > 0 and not self._ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._over.wait()

    def _merged(self, first: Delta) -> Delta:
        """Return `first` with everything behind it of the same channel in one delta."""
        parts = [first]
        while self._inbox:
            other = self._inbox[0]
            if not isinstance(other, Delta) or other.channel != first.channel or other.call:
                break
            parts.append(other)
            self._inbox.popleft()
        if len(parts) == 1:
            return first
        return Delta(
            first.request_id,
            first.seq,
            first.channel,
            "".join(part.text for part in parts),
            [row for part in parts for row in part.logprobs],
            first.call,
        )
