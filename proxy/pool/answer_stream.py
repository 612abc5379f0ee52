"""Holds what a worker sends for one request until the client's task takes it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from hearth.proxy.http.http_exchange import ClientGone
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import (
    Admitted,
    Delta,
    Failed,
    Finished,
    Progress,
    Speaker,
    Usage,
)

ADMIT_WAIT_S_MAX = 120.0  # rendering a full queue of the longest prompts takes a minute
PLAN_WAIT_S_MAX = 0.25  # an idle worker's takes a millisecond
UNREAD_BYTES_MAX = 16 * 1024 * 1024  # of one answer: a million tokens' text, or thousands' logprobs
MERGED_CHARS_MAX = (
    16_384  # of what becomes one event: there are clients that read no 64 KB in a line
)
_LOGPROB_BYTES = 256  # of one alternative, in memory


def refused(failed: Failed) -> RequestError:
    """Return what a worker refused, or broke off, as an error."""
    return RequestError(
        failed.text,
        status=failed.status,
        code=failed.code,
        param=failed.param,
        retry_after_s=failed.retry_after_s,
    )


class AnswerStream:
    """One request's events, from Submit to its one Finished or Failed.

    Invariant: after `_ended` is set nothing is added, and `_release` has been called exactly once;
    deltas that wait take UNREAD_BYTES_MAX at most.
    Owner: the event loop. `take` and `close` never block.
    """

    def __init__(
        self,
        request_id: str,
        release: Callable[[bool], None],
        speaker: Speaker | None = None,
        *,
        model: str = "",
        is_repeat: bool = False,
    ) -> None:
        """`release(cancel)` forgets this answer at its link, and cancels it at the worker.

        It is for `speaker`; `model` and `is_repeat` are the request's `target` and `is_repeat`.
        """
        self.request_id = request_id
        self.speaker = speaker or Speaker()
        self.model = model
        self.is_repeat = is_repeat
        self.asked_at = awake_s()
        self.prompt_tokens = 0
        self.cached_tokens = 0  # when the model took it; `usage` has what was then used
        self.done_tokens = 0  # of the prompt, while it prefills
        self.signature = ""  # of its thinking, once it is admitted
        self.is_admitted = False
        self._is_planned = False  # the model has taken it and says what is kept of it
        self.ended_as = ""  # a finish reason, or a failure's code
        self.status = 200  # of HTTP: what a failure's would be
        self.usage: Usage | None = None  # once the worker has sent it
        self._release = release
        # Kept for a moment: events of one answer
        self.inbox: deque[Delta | Finished | RequestError] = deque()
        self.unread_bytes = 0
        self._wake = asyncio.Event()
        self._silent_at = float("inf")  # when whoever waits is told that nothing came
        self._alarm: asyncio.TimerHandle | None = None  # rings then, or earlier
        self._ended = False
        self.next_seq = 0
        self.recorded: Callable[[Delta], None] | None = None  # is given each part that is read

    @property
    def key(self) -> str:
        """Return the digest of the API key that it is for."""
        return self.speaker.key

    def asked_by(self) -> dict[str, Any]:
        """Return by whom and in which session it is asked, for its own key alone to see."""
        return {
            "session": self.speaker.label,
            "client": self.speaker.client_name,
            "title": self.speaker.title,
            "age_s": round(awake_s() - self.asked_at, 1),
        }

    @property
    def is_prefilling(self) -> bool:
        """Return whether some of its prompt was read for it, and nothing of the answer has come."""
        return self.done_tokens > self.cached_tokens and not self.next_seq

    def outcome(self, broken: RequestError | None) -> tuple[str, int]:
        """Return how it ended, as a word and an HTTP status; `broken` = its reply did not get out.

        Its own failure is told before the reply's.
        """
        if broken is not None and self.status == 200:
            return broken.code, broken.status
        return self.ended_as, self.status

    def progress(self) -> dict[str, Any]:
        """Return how far its prompt is read, in tokens, and how long ago it was asked."""
        return {
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "done_tokens": self.done_tokens,
            **self.asked_by(),
        }

    def take(self, message: Admitted | Progress | Delta | Finished | Failed) -> None:
        """Accept the worker's next message about this request."""
        assert message.request_id == self.request_id, (message.request_id, self.request_id)
        if self._ended:
            return
        if isinstance(message, Delta):
            self._take_delta(message)
        elif isinstance(message, Admitted):
            self.is_admitted = True
            self.prompt_tokens = message.prompt_tokens
            self.signature = message.signature
        elif isinstance(message, Progress):
            if not self._is_planned:
                self._is_planned = True
                self.cached_tokens = message.done_tokens
            self.cached_tokens = min(self.cached_tokens, message.done_tokens)  # it was released
            self.done_tokens = message.done_tokens
        elif isinstance(message, Finished):
            self.usage = message.usage
            given_up = WorkerLost("The worker took this request for abandoned; send it again.")
            self._end(given_up if message.reason == "cancelled" else message)
        else:
            self._end(refused(message))
        self._wake.set()

    def _take_delta(self, delta: Delta) -> None:
        if delta.seq != self.next_seq:
            lost = f"Part {self.next_seq} of the answer was lost on its way from the worker."
            self._end(WorkerLost(lost), cancel=True)
            return
        self.next_seq += 1
        self.unread_bytes += _bytes_of(delta)
        last = self.inbox[-1] if self.inbox else None
        if (
            isinstance(last, Delta)
            and last.channel == delta.channel
            and not delta.call
            and len(last.text) < MERGED_CHARS_MAX  # else it is an event of any length
        ):  # it costs little more than its text
            text, rows = last.text + delta.text, last.logprobs + delta.logprobs
            self.inbox[-1] = Delta(self.request_id, last.seq, last.channel, text, rows, last.call)
        else:
            self.inbox.append(delta)
        if self.unread_bytes > UNREAD_BYTES_MAX:
            self.inbox.clear()
            self._end(
                RequestError(
                    f"More than {UNREAD_BYTES_MAX:,} bytes of this answer wait to be read. Read "
                    "faster, or ask for fewer tokens or log probabilities.",
                    status=503,
                    code="slow_reader",
                ),
                cancel=True,
            )

    def fail(self, error: RequestError) -> None:
        """End with `error`: the worker is gone, or this server stops."""
        if not self._ended:
            self._end(error)

    def close(self) -> None:
        """The client is gone or served; free the worker if it is still at it."""
        if not self._ended:
            self.inbox.clear()
            self._end(ClientGone(), cancel=True)

    def _end(self, last: Finished | RequestError, *, cancel: bool = False) -> None:
        assert not self._ended, self.request_id
        self._ended = True
        if self._alarm is not None:
            self._alarm.cancel()
        self.ended_as = last.reason if isinstance(last, Finished) else last.code
        self.status = 200 if isinstance(last, Finished) else last.status
        self.inbox.append(last)
        self._release(cancel)
        self._wake.set()

    async def admitted(self) -> None:
        """Wait until the worker has accepted the request.

        Raises:
            RequestError: it refused, is gone, or has not said a word for ADMIT_WAIT_S_MAX.
        """
        await self._until(lambda: self.is_admitted, ADMIT_WAIT_S_MAX)
        if not (self.is_admitted or self.inbox):
            raise RequestError(
                f"The worker has not taken this request within {ADMIT_WAIT_S_MAX:g} s.",
                status=503,
                code="worker_unavailable",
            )
        if not self.is_admitted and isinstance(self.inbox[0], RequestError):
            raise self.inbox[0]

    async def planned(self) -> None:
        """Wait a moment for what is kept of the prompt: a busy model looks at it after its chunk.

        Raises nothing.
        """
        await self._until(lambda: self._is_planned, PLAN_WAIT_S_MAX)

    async def _until(self, is_so: Callable[[], bool], wait_s: float) -> None:
        """Wait for that, or for a part of the answer, or for `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (is_so() or self.inbox):
                    self._wake.clear()
                    await self._wake.wait()

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        """Return what comes next, or None when nothing came within `wait_s`.

        Deltas that wait together come as one. After Finished it is not called again.

        Raises:
            RequestError: the request failed; this is its end.
        """
        if not self.inbox and not await self._arrived(wait_s):
            return None
        first = self.inbox.popleft()
        if isinstance(first, RequestError):
            self.inbox.append(first)  # whoever asks again is told again
            raise first
        if isinstance(first, Delta):
            self.unread_bytes -= _bytes_of(first)
            assert self.unread_bytes >= 0, (self.request_id, self.unread_bytes)
            if self.recorded is not None:
                self.recorded(first)
        return first

    async def _arrived(self, wait_s: float | None) -> bool:
        """Wait until something is there; return False where nothing came within `wait_s`.

        A timer for each delta would cost more than all else here: one runs, and is set again where
        it rings too early.
        """
        loop = asyncio.get_running_loop()
        self._silent_at = float("inf") if wait_s is None else loop.time() + wait_s
        if wait_s is not None and self._alarm is None:
            self._alarm = loop.call_later(wait_s, self._ring)
        while not self.inbox:
            self._wake.clear()
            await self._wake.wait()
            if not self.inbox and loop.time() >= self._silent_at:
                return False
        return True

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        left_s, self._alarm = self._silent_at - loop.time(), None
        if left_s > 0:
            self._alarm = loop.call_later(left_s, self._ring)
        else:
            self._wake.set()


def _bytes_of(delta: Delta) -> int:
    """Return about how much memory `delta` takes; as much as the parts that it was made of."""
    return len(delta.text) + sum(_LOGPROB_BYTES * (1 + len(row.top)) for row in delta.logprobs)
