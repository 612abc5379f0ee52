"""Carries requests to one worker and its answers back: the connection to one start of one worker.

The supervisor opens a link when it starts a worker and closes it when the worker is gone; every
client that waits on that worker is then told at once. `remote_workers` does so for workers on other
machines. Nothing here starts or kills a process. What the worker sends for a request is held until
the client's task takes it.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import Overloaded, RequestError, WireError, WorkerLost
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Admitted,
    Cancel,
    Count,
    Counted,
    Delta,
    Embed,
    Embedded,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Progress,
    Renew,
    Rerank,
    Reranked,
    ShortTurns,
    Speaker,
    Status,
    Submit,
    Told,
    Usage,
    Welcome,
    decode,
)
from hearth.shared.zmq_transport import CurveKeys, DealerLink, QueueFull

log = logging.getLogger(__name__)

_ANSWERING = (Delta, Progress, Admitted, Finished, Failed)  # the messages that make up an answer
_Reply = Counted | Told | Embedded | Reranked
WorkerReply = TypeVar("WorkerReply", bound=_Reply)
# (an answer whose client left, what it cost)
CountUnread = Callable[["AnswerStream", Usage], None]

OTHERS_KEEP_S: Final = 300.0  # what Ollama keeps a model for after each use
ADMIT_WAIT_S_MAX = 120.0  # rendering a full queue of the longest prompts takes a minute
PLAN_WAIT_S_MAX = 0.25  # an idle worker's takes a millisecond
UNREAD_BYTES_MAX = 16 * 1024 * 1024  # of one answer: a million tokens' text, or thousands' logprobs
MERGED_CHARS_MAX = 16_384  # of one event: there are clients that read no 64 KB in a line
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


class LastUses:
    """When requests last began or ended, by who asked. Owner: the event loop.

    Two times are enough for every key: all before the last key's turn are others' than it.
    """

    def __init__(self) -> None:
        self.at = 0.0  # the last one (`awake_s`); 0.0 = never
        self._key = ""  # whose that was
        self._before = 0.0  # the last one of another key than that

    def note(self, key: str) -> None:
        """A request of `key` begins or ends."""
        if key != self._key:
            self._key, self._before = key, self.at
        self.at = awake_s()

    def is_kept_for_others(self, key: str) -> bool:
        """Return whether another key than `key` has used the model a short while ago."""
        last = self._before if key == self._key else self.at
        return last > 0.0 and awake_s() - last < OTHERS_KEEP_S


class WorkerLink:
    """The connection to one start of one worker. Owner: the event loop.

    Invariant: `answers` has the answers that have no end yet, and none once the link is closed;
    each request id is sent over it once.
    """

    def __init__(
        self,
        worker_id: int,
        endpoint: str,
        on_change: Callable[[], None],
        keys: CurveKeys | None = None,
        models: Collection[str] = (),
    ) -> None:
        """`keys` are for tcp:// only. A worker of none of `models`, () = any, is refused."""
        self.worker_id = worker_id
        self.heartbeat: Heartbeat | None = None
        self.welcome: Welcome | None = None
        self.heard_at = awake_s()
        self.ready_at = 0.0
        self.uses = LastUses()  # the requests that it took or ended; reports do not count
        self.is_unwanted = False  # somebody wished its model unloaded, and none was submitted since
        self.closed_at: float | None = None  # requests that came later are not for it
        self.answers: dict[str, AnswerStream] = {}
        self._asked: dict[str, asyncio.Future[_Reply]] = {}  # request id -> its one reply
        self._on_change = on_change
        # Counts what an answer cost whose client left before its end: nobody else takes its usage.
        self.count_unread: CountUnread = lambda _answer, _usage: None
        self._cancelled: dict[str, AnswerStream] = {}  # until the worker tells their end
        self._models = models
        self.refusal = ""  # what the worker does, for which this proxy cannot work with it
        self.is_closed = False
        self._socket = DealerLink(endpoint, self._take_frame, keys)
        self._socket.send(Hello(PROTOCOL_VERSION))

    @property
    def is_ready(self) -> bool:
        """Return whether it may be sent requests: it said Welcome, and that its model is loaded."""
        beat = None if self.is_closed or self.welcome is None else self.heartbeat
        return beat is not None and beat.state == "ready"

    def takes(self, model: str, came_at: float) -> bool:
        """Return whether it is there for a request that came then; `model` "" = any."""
        if not self.is_ready or (self.closed_at is not None and came_at >= self.closed_at):
            return False
        assert self.heartbeat is not None, "ready"
        facts = self.heartbeat.model
        return not model or (facts is not None and facts.name == model)

    def is_kept_for_others(self, key: str) -> bool:
        """Return whether another key than `key` uses the model, or has a short while ago."""
        is_used = any(answer.key != key for answer in self.answers.values())
        return is_used or self.uses.is_kept_for_others(key)

    @property
    def load(self) -> int:
        return len(self.answers) + len(self._asked)

    @property
    def silence_s(self) -> float:
        return awake_s() - self.heard_at

    def _take_frame(self, frame: bytes) -> None:
        """Take what came; where a bug of ours ends it, nobody waits on this worker any more."""
        try:
            self.heard_at = awake_s()
            self.take(decode(frame))
        except WireError as error:
            log.warning("bad frame dropped worker=%d: %s", self.worker_id, error)
        except Exception as error:
            log.error("link failed worker=%d", self.worker_id, exc_info=error)
            self.close("The proxy lost its line to the worker.")

    def take(self, message: Message) -> None:
        """Hand what the worker sent to whoever waits for it."""
        if isinstance(message, _ANSWERING):
            self._route(message)
            return
        was_ready = self.is_ready
        if isinstance(message, _Reply):
            self._settle(message.request_id, message)
        elif isinstance(message, Heartbeat):
            self.heartbeat, model = message, message.model
            if model is not None and self._models and model.name not in self._models:
                self._refuse(
                    f"serves {model.name!r}, this server {', '.join(map(repr, self._models))}: set "
                    "MODEL_PATH and PROXY_MODEL_ID alike",
                    "The worker serves another model.",
                )
        elif isinstance(message, Welcome):
            if message.protocol_version == PROTOCOL_VERSION:
                self.welcome = message
            else:
                self._refuse(
                    f"speaks protocol {message.protocol_version}, this server {PROTOCOL_VERSION}: "
                    "install one version of Hearth on both machines",
                    "The worker speaks another version of the protocol.",
                )
        if self.is_ready and not was_ready:
            self.ready_at = awake_s()
            self._on_change()

    def _route(self, message: Admitted | Progress | Delta | Finished | Failed) -> None:
        answer = self.answers.get(message.request_id)
        if answer is not None:
            answer.take(message)
        elif isinstance(message, Failed):
            self._cancelled.pop(message.request_id, None)
            self._settle(message.request_id, refused(message))
        elif isinstance(message, Finished):
            cancelled = self._cancelled.pop(message.request_id, None)
            if cancelled is not None:
                self.count_unread(cancelled, message.usage)

    def _refuse(self, what: str, text: str) -> None:
        """Close the link for `what` the worker does; `text` tells its clients."""
        self.refusal = what
        log.error("worker=%d %s", self.worker_id, what)
        self.close(text)

    async def broken(self) -> None:
        """Return once the connection to the worker broke off. Once."""
        await self._socket.disconnected()

    def submit(self, request: ParsedRequest, request_id: str) -> AnswerStream:
        """Send `request` and return its answer, which nothing has arrived for yet."""
        assert request_id not in self.answers, request_id
        assert request_id not in self._cancelled, request_id
        self.is_unwanted = False
        self.uses.note(request.prompt.speaker.key)

        def release(cancel: bool) -> None:
            self.uses.note(request.prompt.speaker.key)
            ended = self.answers.pop(request_id, None)
            assert ended is not None, (self.worker_id, request_id)
            if cancel:
                self._cancelled[request_id] = ended
                self.send_late(Cancel(request_id))

        self._send(
            Submit(
                request_id=request_id,
                prompt=request.prompt,
                sampling=request.sampling,
                constraints=request.constraints,
                use_kv_cache=request.use_kv_cache,
                prefill_only=request.prefill_only,
                pin=request.pin,
                prediction=request.prediction,
                adapter=request.adapter,
            )
        )
        answer = self.answers[request_id] = AnswerStream(
            request_id,
            release,
            request.prompt.speaker,
            model=request.served_as,
            is_repeat=request.is_repeat,
        )
        return answer

    async def reply(
        self,
        message: Count | Status | Embed | Rerank,
        kind: type[WorkerReply],
        wait_s: float | None = None,
    ) -> WorkerReply:
        """Send what is answered by one message of `kind`, or by a Failed, and return that.

        Cancelled, it is not computed on.

        Raises:
            RequestError: it is refused, cannot be carried, or is not answered within `wait_s`.
            WorkerLost: the worker died, or is not there.
        """
        assert message.request_id not in self._asked, message.request_id
        self._send(message)
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._asked[message.request_id] = future
        try:
            async with asyncio.timeout(wait_s):
                reply = await future
        except TimeoutError:
            raise Overloaded(
                f"The worker has not answered within {wait_s:g} s; try again."
            ) from None
        finally:
            self._asked.pop(message.request_id, None)
            if future.cancelled():
                self.send_late(Cancel(message.request_id))
        assert isinstance(reply, kind), (type(reply), kind)
        return reply

    def _settle(self, request_id: str, result: _Reply | RequestError) -> None:
        future = self._asked.get(request_id)
        if future is None or future.done():
            return
        if isinstance(result, RequestError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _send(self, message: Submit | Count | Status | Embed | Rerank) -> None:
        try:
            self._socket.send(message)
        except QueueFull:
            raise WorkerLost("The worker does not take requests now; try again.") from None
        except WireError as error:
            raise RequestError(f"The request cannot be carried: {error}.") from None

    def send_late(self, message: Cancel | Renew | ShortTurns) -> None:
        """Send what a dead worker, or one that does not read, does not need any more."""
        if not self.is_closed:
            with contextlib.suppress(WireError):
                self._socket.send(message)

    def renew(self) -> None:
        if self.answers or self._asked:
            self.send_late(Renew([*self.answers, *self._asked]))

    def close(self, text: str, errors: Mapping[str, RequestError] | None = None) -> None:
        """Tell every client that waits on this worker that it is gone; `errors` go by request."""
        if self.is_closed:
            return
        self.is_closed = True
        self._socket.close()
        for answer in list(self.answers.values()):
            answer.fail((errors or {}).get(answer.request_id) or WorkerLost(text))
        for request_id in list(self._asked):
            self._settle(request_id, WorkerLost(text))
        assert not self.answers, (self.worker_id, list(self.answers))


def link_row(link: WorkerLink | None, model: str | None = None) -> dict[str, Any]:
    """Return what /health tells of a worker by what it says itself: nothing where there is none.

    `model` is what it is to have, as long as it does not tell.
    """
    beat = link.heartbeat if link is not None else None
    return {
        "running": beat.running if beat else 0,
        "waiting": beat.waiting if beat else 0,
        "wait_s": round(beat.wait_s, 1) if beat else None,
        "in_flight": link.load if link else 0,
        "requests_max": beat.requests_max if beat else 0,
        "steps": beat.steps if beat else 0,
        "active_bytes": beat.active_bytes if beat else 0,
        "heartbeat_age_s": round(link.silence_s, 3) if link and beat else None,
        "model": beat.model.name if beat and beat.model else model,
        "ranks": beat.model.ranks if beat and beat.model else None,
        # How far a start is: its step, and of what the step brings how much is there.
        "loading": {
            "step": beat.step,
            "s": round(beat.step_s, 1),
            "held_bytes": beat.held_bytes,
            "of_bytes": beat.step_bytes,
        }
        if beat and beat.step
        else None,
    }
