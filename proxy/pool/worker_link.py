"""Carries requests to one worker and its events back: the connection to one start of one worker.

The supervisor opens a link when it starts a worker and closes it when the worker is gone; every
client that waits on that worker is then told at once. `remote_workers` does so for workers on other
machines. Nothing here starts or kills a process.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

from hearth.proxy.pool.answer_stream import AnswerStream, refused
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
CountUnread = Callable[[AnswerStream, Usage], None]  # (an answer whose client left, what it cost)

OTHERS_KEEP_S: Final = 300.0  # what Ollama keeps a model for after each use


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
        await self._socket.broken()

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
