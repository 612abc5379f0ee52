"""Carries requests to one worker and its answers back.

A link is the connection to one process of a worker. The supervisor opens it when it starts the
process, and closes it when the process has ended; every request that waits on the worker then fails
at once. `remote_workers` does the same for workers on other machines. This module starts and kills
no process. The worker's messages for a request are buffered until the client's task reads them.
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
# Called with an answer whose client left, and the answer's usage.
CountUnread = Callable[["AnswerStream", Usage], None]

OTHERS_KEEP_S: Final = 300.0  # as long as Ollama keeps a model after each use
ADMIT_WAIT_S_MAX = 120.0  # rendering a full queue of the longest prompts takes a minute
PLAN_WAIT_S_MAX = 0.25  # an idle worker plans in a millisecond
UNREAD_BYTES_MAX = 16 * 1024 * 1024  # bytes of a million tokens' text, or of thousands of logprobs
MERGED_CHARS_MAX = 16_384  # characters of one event: some clients cannot read a line of 64 KB
_LOGPROB_BYTES = 256  # memory of one alternative


def error_of(failed: Failed) -> RequestError:
    """Return the error with which a worker refused or ended a request."""
    return RequestError(
        failed.text,
        status=failed.status,
        code=failed.code,
        param=failed.param,
        retry_after_s=failed.retry_after_s,
    )


class AnswerStream:
    """Buffers the events of one request, from Submit to its one Finished or Failed.

    Invariant: once `_ended` is set, no event is added and `_release` has been called exactly once;
    unread deltas take at most UNREAD_BYTES_MAX.
    Owner: the event loop. `receive` and `close` never block.
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
        """`release(cancel)` removes the answer from its link, and with `cancel` stops it.

        `speaker` is the client; `model` and `is_repeat` are the request's.
        """
        self.request_id = request_id
        self.speaker = speaker or Speaker()
        self.model = model
        self.is_repeat = is_repeat
        self.asked_at = awake_s()
        self.prompt_tokens = 0
        self.cached_tokens = 0  # as planned; `usage` has the tokens that were really reused
        self.done_tokens = 0  # prompt tokens that are prefilled or reused so far
        self.signature = ""  # signature of the thinking; set at admission
        self.is_admitted = False
        self._is_planned = False  # the worker has reported the cached tokens
        self.ended_as = ""  # finish reason, or the failure's code
        self.status = 200  # HTTP status; a failure sets another
        self.usage: Usage | None = None  # usage, once the worker has sent it
        self._release = release
        # Kept for a moment: unread events of one answer
        self.inbox: deque[Delta | Finished | RequestError] = deque()
        self.unread_bytes = 0
        self._wake = asyncio.Event()
        self._timeout_at = float("inf")  # when `next_event` returns None
        self._timer: asyncio.TimerHandle | None = None  # fires at `_timeout_at` or earlier
        self._ended = False
        self.next_seq = 0
        self.on_read: Callable[[Delta], None] | None = None  # called with each delta that is read

    @property
    def api_key(self) -> str:
        """Return the digest of the client's API key."""
        return self.speaker.key

    def requester_fields(self) -> dict[str, Any]:
        """Return JSON fields that name the client and its session, for its own API key to see."""
        return {
            "session": self.speaker.label,
            "client": self.speaker.client_name,
            "title": self.speaker.title,
            "age_s": round(awake_s() - self.asked_at, 1),
        }

    @property
    def is_prefilling(self) -> bool:
        """Return whether a part of the prompt is prefilled and no delta has come yet."""
        return self.done_tokens > self.cached_tokens and not self.next_seq

    def outcome(self, broken: RequestError | None) -> tuple[str, int]:
        """Return how the request ended, as a code and an HTTP status.

        `broken` says why the reply did not reach the client; the answer's own failure goes first.
        """
        if broken is not None and self.status == 200:
            return broken.code, broken.status
        return self.ended_as, self.status

    def progress(self) -> dict[str, Any]:
        """Return JSON fields: the progress of the prefill in tokens, and the request's age."""
        return {
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "done_tokens": self.done_tokens,
            **self.requester_fields(),
        }

    def receive(self, message: Admitted | Progress | Delta | Finished | Failed) -> None:
        """Take in the worker's next message about this request."""
        assert message.request_id == self.request_id, (message.request_id, self.request_id)
        if self._ended:
            return
        if isinstance(message, Delta):
            self._receive_delta(message)
        elif isinstance(message, Admitted):
            self.is_admitted = True
            self.prompt_tokens = message.prompt_tokens
            self.signature = message.signature
        elif isinstance(message, Progress):
            if not self._is_planned:
                self._is_planned = True
                self.cached_tokens = message.done_tokens
            # Fewer tokens than before: the restored KV was released.
            self.cached_tokens = min(self.cached_tokens, message.done_tokens)
            self.done_tokens = message.done_tokens
        elif isinstance(message, Finished):
            self.usage = message.usage
            given_up = WorkerLost("The worker took this request for abandoned; send it again.")
            self._end(given_up if message.reason == "cancelled" else message)
        else:
            self._end(error_of(message))
        self._wake.set()

    def _receive_delta(self, delta: Delta) -> None:
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
            and len(last.text) < MERGED_CHARS_MAX
        ):  # merged, a delta costs little more memory than its text
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
        """End the answer with `error`: the worker has gone, or this server stops."""
        if not self._ended:
            self._end(error)

    def close(self) -> None:
        """Cancel the request at the worker unless it has ended: its client is gone or served."""
        if not self._ended:
            self.inbox.clear()
            self._end(ClientGone(), cancel=True)

    def _end(self, last: Finished | RequestError, *, cancel: bool = False) -> None:
        assert not self._ended, self.request_id
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        self.ended_as = last.reason if isinstance(last, Finished) else last.code
        self.status = 200 if isinstance(last, Finished) else last.status
        self.inbox.append(last)
        self._release(cancel)
        self._wake.set()

    async def admitted(self) -> None:
        """Wait until the worker has accepted the request.

        Raises:
            RequestError: the worker refused, has gone, or did not admit within ADMIT_WAIT_S_MAX.
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
        """Wait up to PLAN_WAIT_S_MAX for the cached tokens; a busy worker plans after its chunk.

        Raises nothing.
        """
        await self._until(lambda: self._is_planned, PLAN_WAIT_S_MAX)

    async def _until(self, is_so: Callable[[], bool], wait_s: float) -> None:
        """Wait until `is_so()`, until an event of the answer is there, or for `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (is_so() or self.inbox):
                    self._wake.clear()
                    await self._wake.wait()

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        """Return the next event, or None if none came within `wait_s`.

        Unread deltas of one channel come merged. Do not call it again after Finished.

        Raises:
            RequestError: the request failed; no event follows.
        """
        if not self.inbox and not await self._arrived(wait_s):
            return None
        first = self.inbox.popleft()
        if isinstance(first, RequestError):
            self.inbox.append(first)  # the next call raises the error again
            raise first
        if isinstance(first, Delta):
            self.unread_bytes -= _bytes_of(first)
            assert self.unread_bytes >= 0, (self.request_id, self.unread_bytes)
            if self.on_read is not None:
                self.on_read(first)
        return first

    async def _arrived(self, wait_s: float | None) -> bool:
        """Wait until an event is there; return False if none came within `wait_s`.

        One timer serves all deltas and is set again when it fires early: a timer for each delta
        would cost more than the rest of this method.
        """
        loop = asyncio.get_running_loop()
        self._timeout_at = float("inf") if wait_s is None else loop.time() + wait_s
        if wait_s is not None and self._timer is None:
            self._timer = loop.call_later(wait_s, self._on_timer)
        while not self.inbox:
            self._wake.clear()
            await self._wake.wait()
            if not self.inbox and loop.time() >= self._timeout_at:
                return False
        return True

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        left_s, self._timer = self._timeout_at - loop.time(), None
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._on_timer)
        else:
            self._wake.set()


def _bytes_of(delta: Delta) -> int:
    """Return roughly the memory of `delta`; a merged delta takes the sum of its parts."""
    return len(delta.text) + sum(_LOGPROB_BYTES * (1 + len(row.top)) for row in delta.logprobs)


class LastUses:
    """Remembers when requests last began or ended, by API key. Owner: the event loop.

    Two times answer `is_kept_for_others` for every key: the last use, and the last use by any
    other key.
    """

    def __init__(self) -> None:
        self.at = 0.0  # last use (`awake_s`); 0.0 = never
        self._api_key = ""  # digest of the API key of the last use
        self._others_at = 0.0  # last use by another API key

    def record(self, api_key: str) -> None:
        """Record that a request of `api_key` begins or ends now."""
        if api_key != self._api_key:
            self._api_key, self._others_at = api_key, self.at
        self.at = awake_s()

    def is_kept_for_others(self, api_key: str) -> bool:
        """Return whether another key than `api_key` used the model within OTHERS_KEEP_S."""
        last = self._others_at if api_key == self._api_key else self.at
        return last > 0.0 and awake_s() - last < OTHERS_KEEP_S


class WorkerLink:
    """The connection to one process of one worker. Owner: the event loop.

    Invariant: `answers` holds the answers that have not ended, and none once the link is closed;
    each request id is sent over the link once.
    """

    def __init__(
        self,
        worker_id: int,
        endpoint: str,
        on_change: Callable[[], None],
        keys: CurveKeys | None = None,
        models: Collection[str] = (),
    ) -> None:
        """`keys` are for tcp:// only. A worker must serve one of `models`; () = any model."""
        self.worker_id = worker_id
        self.heartbeat: Heartbeat | None = None
        self.welcome: Welcome | None = None
        self.last_frame_at = awake_s()
        self.ready_at = 0.0
        self.uses = LastUses()  # uses by generating and counting requests; reports do not count
        self.is_unwanted = False  # a client asked to unload the model, and no request came since
        self.closed_at: float | None = None  # requests that came after this time go elsewhere
        self.answers: dict[str, AnswerStream] = {}
        self._pending_replies: dict[str, asyncio.Future[_Reply]] = {}  # replies by request id
        self._on_change = on_change
        # Counts the usage of an answer whose client left before the end.
        self.count_unread: CountUnread = lambda _answer, _usage: None
        self._cancelled: dict[str, AnswerStream] = {}  # answers that the worker has not yet ended
        self._models = models
        self.refusal = ""  # why this proxy cannot use the worker; "" = usable
        self.is_closed = False
        self._socket = DealerLink(endpoint, self._receive_frame, keys)
        self._socket.send(Hello(PROTOCOL_VERSION))

    @property
    def is_ready(self) -> bool:
        """Return whether requests may be sent: the worker sent Welcome and has loaded its model."""
        beat = None if self.is_closed or self.welcome is None else self.heartbeat
        return beat is not None and beat.state == "ready"

    def takes(self, model: str, came_at: float) -> bool:
        """Return whether the worker serves a request that came at `came_at`; `model` "" = any."""
        if not self.is_ready or (self.closed_at is not None and came_at >= self.closed_at):
            return False
        assert self.heartbeat is not None, "ready"
        facts = self.heartbeat.model
        return not model or (facts is not None and facts.name == model)

    def is_kept_for_others(self, api_key: str) -> bool:
        """Return whether another key than `api_key` uses the model or did within OTHERS_KEEP_S."""
        is_used = any(answer.api_key != api_key for answer in self.answers.values())
        return is_used or self.uses.is_kept_for_others(api_key)

    @property
    def load(self) -> int:
        return len(self.answers) + len(self._pending_replies)

    @property
    def silence_s(self) -> float:
        return awake_s() - self.last_frame_at

    def _receive_frame(self, frame: bytes) -> None:
        """Decode and handle a frame; a bug of ours here closes the link, so no request hangs."""
        try:
            self.last_frame_at = awake_s()
            self.receive(decode(frame))
        except WireError as error:
            log.warning("bad frame dropped worker=%d: %s", self.worker_id, error)
        except Exception as error:
            log.error("link failed worker=%d", self.worker_id, exc_info=error)
            self.close("The proxy lost its line to the worker.")

    def receive(self, message: Message) -> None:
        """Handle a message of the worker, and wake the task that waits for it."""
        if isinstance(message, _ANSWERING):
            self._route(message)
            return
        was_ready = self.is_ready
        if isinstance(message, _Reply):
            self._resolve(message.request_id, message)
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
            answer.receive(message)
        elif isinstance(message, Failed):
            self._cancelled.pop(message.request_id, None)
            self._resolve(message.request_id, error_of(message))
        elif isinstance(message, Finished):
            cancelled = self._cancelled.pop(message.request_id, None)
            if cancelled is not None:
                self.count_unread(cancelled, message.usage)

    def _refuse(self, what: str, text: str) -> None:
        """Close the link because of `what` the worker does; `text` is the clients' error."""
        self.refusal = what
        log.error("worker=%d %s", self.worker_id, what)
        self.close(text)

    async def disconnected(self) -> None:
        """Return once the connection to the worker is lost. Call it once."""
        await self._socket.disconnected()

    def submit(self, request: ParsedRequest, request_id: str) -> AnswerStream:
        """Send `request` and return its answer, still empty."""
        assert request_id not in self.answers, request_id
        assert request_id not in self._cancelled, request_id
        self.is_unwanted = False
        self.uses.record(request.prompt.speaker.key)

        def release(cancel: bool) -> None:
            self.uses.record(request.prompt.speaker.key)
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
        """Send `message` and return the worker's one reply, which is of `kind`.

        If the caller is cancelled, the worker stops computing the reply.

        Raises:
            RequestError: `message` is refused or cannot be encoded, or no reply came in `wait_s`.
            WorkerLost: the worker died, or is not there.
        """
        assert message.request_id not in self._pending_replies, message.request_id
        self._send(message)
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._pending_replies[message.request_id] = future
        try:
            async with asyncio.timeout(wait_s):
                reply = await future
        except TimeoutError:
            raise Overloaded(
                f"The worker has not answered within {wait_s:g} s; try again."
            ) from None
        finally:
            self._pending_replies.pop(message.request_id, None)
            if future.cancelled():
                self.send_late(Cancel(message.request_id))
        assert isinstance(reply, kind), (type(reply), kind)
        return reply

    def _resolve(self, request_id: str, result: _Reply | RequestError) -> None:
        future = self._pending_replies.get(request_id)
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
        """Send a message that may be lost: a dead or stuck worker does not need it."""
        if not self.is_closed:
            with contextlib.suppress(WireError):
                self._socket.send(message)

    def renew(self) -> None:
        if self.answers or self._pending_replies:
            self.send_late(Renew([*self.answers, *self._pending_replies]))

    def close(self, text: str, errors: Mapping[str, RequestError] | None = None) -> None:
        """Fail every request that waits on this worker, with its error in `errors`, else `text`."""
        if self.is_closed:
            return
        self.is_closed = True
        self._socket.close()
        for answer in list(self.answers.values()):
            answer.fail((errors or {}).get(answer.request_id) or WorkerLost(text))
        for request_id in list(self._pending_replies):
            self._resolve(request_id, WorkerLost(text))
        assert not self.answers, (self.worker_id, list(self.answers))


def link_health_fields(link: WorkerLink | None, model: str | None = None) -> dict[str, Any]:
    """Return the JSON fields of /health that come from the worker's heartbeat, None without one.

    `model` is the model that the worker should have; it counts until a heartbeat names one.
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
        # Progress of a start: the step, its bytes loaded so far, and its bytes in all.
        "loading": {
            "step": beat.step,
            "s": round(beat.step_s, 1),
            "held_bytes": beat.held_bytes,
            "of_bytes": beat.step_bytes,
        }
        if beat and beat.step
        else None,
    }
