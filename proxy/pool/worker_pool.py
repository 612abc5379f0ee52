"""The workers as the proxy sees them: one link to each, requests out, events back.

The supervisor opens a link when it starts a worker and closes it when the worker is gone; then
every client that waits on it is told at once. `remote` does so for workers on other machines.
Nothing here starts or kills a process.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hearth.proxy.api.error_bodies import refused
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.pool.cache_affinity import CacheAffinity, marks_of
from hearth.proxy.pool.waiting_requests import WaitingRequests
from hearth.proxy.request.parsed_request import ClientLeft, ParsedRequest
from hearth.proxy.workers.model_swap_policy import WaitingRequest
from hearth.shared.errors import Overloaded, RequestError, WireError, WorkerLost
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Admitted,
    Cancel,
    Count,
    Counted,
    Delta,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    ModelFacts,
    Progress,
    Prompt,
    Renew,
    Status,
    Submit,
    Told,
    Usage,
    Welcome,
)
from hearth.shared.zmq_transport import LEASE_RENEW_S, CurveKeys, DealerLink, QueueFull

log = logging.getLogger(__name__)

COUNT_WAIT_S_MAX = 30.0
STATUS_WAIT_S_MAX = 5.0
ATTEMPTS_MAX = 2  # a request that kills a worker must not kill them all

ReportKind = Literal[
    "cache", "clear_cache", "unpin", "prompt", "sessions", "session", "tree"
]  # of Status
WorkerReply = TypeVar("WorkerReply", Counted, Told)


class WorkerLink:
    """The line to one start of one worker. Owner: the event loop."""

    def __init__(
        self,
        worker_id: int,
        endpoint: str,
        on_change: Callable[[], None],
        keys: CurveKeys | None = None,
        models: Collection[str] = (),
        is_apart: bool = False,
    ) -> None:
        """`keys` are for tcp:// only, `is_apart` is of Submit.

        A worker whose model is none of `models`, () = any, is refused.
        """
        self.worker_id = worker_id
        self.heartbeat: Heartbeat | None = None
        self.welcome: Welcome | None = None
        self.heard_at = time.monotonic()
        self.ready_at = 0.0
        self.used_at = 0.0  # when it last took or ended a request; what it is asked does not count
        self.closed_at: float | None = None  # requests that came later are not for it
        self.answers: dict[str, AnswerStream] = {}
        self._asked: dict[str, asyncio.Future[Counted | Told]] = {}  # request id -> its one reply
        self._on_change = on_change
        # Is told what a request has cost whose client had left: nobody waits for its end.
        self.on_left: Callable[[Usage, ClientLeft], None] = lambda _usage, _left: None
        self._left: dict[str, ClientLeft] = {}  # until the worker tells their end
        self._models = models
        self._is_apart = is_apart
        self._line = DealerLink(endpoint, keys)
        self._line.send(Hello(PROTOCOL_VERSION))
        self._closed = False
        self._reader = asyncio.create_task(self._read(), name=f"link {worker_id}")
        self._reader.add_done_callback(self._read_ended)

    @property
    def is_ready(self) -> bool:
        """Whether it may be sent requests: it said Welcome, and that its model is loaded."""
        if self._closed or self.welcome is None or self.heartbeat is None:
            return False
        return self.heartbeat.state == "ready"

    def takes(self, model: str, came_at: float) -> bool:
        """Whether it is there for a request that came then; `model` "" = any."""
        if not self.is_ready or (self.closed_at is not None and came_at >= self.closed_at):
            return False
        assert self.heartbeat is not None, "ready"
        facts = self.heartbeat.model
        return not model or (facts is not None and facts.name == model)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def load(self) -> int:
        return len(self.answers) + len(self._asked)

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self.heard_at

    async def _read(self) -> None:
        while True:
            try:
                message = await self._line.receive()
            except WireError as error:
                log.warning("bad frame dropped worker=%d: %s", self.worker_id, error)
                continue
            self.heard_at = time.monotonic()
            self._take(message)

    def _read_ended(self, reader: asyncio.Task[None]) -> None:
        """A bug of ours ended the reader: nobody may wait on it. The supervisor sees silence."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            log.error("link failed worker=%d", self.worker_id, exc_info=error)
            self.close("The proxy lost its line to the worker.")

    def _take(self, message: Message) -> None:
        was_ready = self.is_ready
        if isinstance(message, Admitted | Progress | Delta | Finished | Failed):
            self._route(message)
        elif isinstance(message, Counted | Told):
            self._settle(message.request_id, message)
        elif isinstance(message, Heartbeat):
            self._note(message)
        elif isinstance(message, Welcome):
            self._greet(message)
        if self.is_ready and not was_ready:
            self.ready_at = time.monotonic()
            self._on_change()

    def _route(self, message: Admitted | Progress | Delta | Finished | Failed) -> None:
        answer = self.answers.get(message.request_id)
        if answer is not None:
            answer.take(message)
        elif isinstance(message, Failed):
            self._left.pop(message.request_id, None)
            self._settle(message.request_id, refused(message))
        elif isinstance(message, Finished):
            left = self._left.pop(message.request_id, None)
            if left is not None:
                self.on_left(message.usage, left)

    def _greet(self, welcome: Welcome) -> None:
        version = welcome.protocol_version
        if version == PROTOCOL_VERSION:
            self.welcome = welcome
            return
        log.error(
            "worker=%d speaks protocol %d, this proxy %d: start both from one checkout",
            self.worker_id,
            version,
            PROTOCOL_VERSION,
        )
        self.close("The worker speaks another version of the protocol.")

    def _note(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        model = heartbeat.model
        if model is not None and self._models and model.name not in self._models:
            log.error(
                "worker=%d serves %r, this proxy %s: set MODEL_PATH and PROXY_MODEL_ID alike",
                self.worker_id,
                model.name,
                ", ".join(map(repr, self._models)),
            )
            self.close("The worker serves another model.")

    async def broken(self) -> None:
        """Return once the connection to the worker broke off. Once."""
        await self._line.broken()

    def submit(self, request: ParsedRequest, request_id: str) -> AnswerStream:
        """Send `request` and return its answer, which nothing has arrived for yet."""
        assert request_id not in self.answers, request_id
        key = request.prompt.speaker.key
        left = ClientLeft(key, request.target, request.is_repeat)

        def release(cancel: bool) -> None:
            self.used_at = time.monotonic()
            self.answers.pop(request_id, None)
            if cancel:
                self._left[request_id] = left
                self._send_late(Cancel(request_id))

        message = Submit(
            request_id,
            request.prompt,
            request.sampling,
            request.constraints,
            request.use_kv_cache,
            request.prefill_only,
            request.pin,
            self._is_apart,
        )
        self._send(message)
        answer = self.answers[request_id] = AnswerStream(request_id, release, key)
        return answer

    def queue(self, key: str) -> list[dict[str, Any]]:
        """Return which of our requests wait there, as it told last; see `WorkerPool.queue`."""
        ids = self.heartbeat.queue if self.heartbeat is not None else []
        now = time.monotonic()
        return [
            {
                "request_id": request_id,
                "worker": self.worker_id,
                "position": position,
                "age_s": round(now - answer.asked_at, 1),
            }
            for position, request_id in enumerate(ids, start=1)
            if (answer := self.answers.get(request_id)) is not None and key in ("", answer.key)
        ]

    async def count(self, prompt: Prompt) -> int:
        self.used_at = time.monotonic()
        message = Count(uuid.uuid4().hex, prompt, self._is_apart)
        return (await self._reply(message, Counted, COUNT_WAIT_S_MAX)).tokens

    async def ask(self, what: ReportKind, about: str = "", key: str = "") -> dict[str, Any]:
        """Return what the worker tells about its cache or its sessions.

        Raises:
            RequestError: it refuses, is gone, or has not answered within STATUS_WAIT_S_MAX.
        """
        message = Status(uuid.uuid4().hex, what, about, key)
        return (await self._reply(message, Told, STATUS_WAIT_S_MAX)).body

    async def _reply(
        self, message: Count | Status, kind: type[WorkerReply], wait_s: float
    ) -> WorkerReply:
        """Send what is answered by one message of `kind`, or by a Failed, and return that."""
        self._send(message)
        future: asyncio.Future[Counted | Told] = asyncio.get_running_loop().create_future()
        self._asked[message.request_id] = future
        try:
            async with asyncio.timeout(wait_s):
                reply = await future
        except TimeoutError:
            text = f"The worker has not answered within {wait_s:g} s; try again."
            raise Overloaded(text) from None
        finally:
            self._asked.pop(message.request_id, None)
        assert isinstance(reply, kind), (type(reply), kind)
        return reply

    def _settle(self, request_id: str, result: Counted | Told | RequestError) -> None:
        future = self._asked.get(request_id)
        if future is None or future.done():
            return
        if isinstance(result, RequestError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _send(self, message: Submit | Count | Status) -> None:
        try:
            self._line.send(message)
        except QueueFull:
            raise WorkerLost("The worker does not take requests now; try again.") from None
        except WireError as error:
            raise RequestError(f"The request cannot be carried: {error}.") from None

    def _send_late(self, message: Cancel | Renew) -> None:
        """Send what a dead worker, or one that does not read, does not need any more."""
        if not self._closed:
            with contextlib.suppress(WireError):
                self._line.send(message)

    def renew(self) -> None:
        if self.answers or self._asked:
            self._send_late(Renew([*self.answers, *self._asked]))

    def close(self, text: str) -> None:
        """Tell every client that waits on this worker that it is gone."""
        if self._closed:
            return
        self._closed = True
        self._reader.cancel()
        self._line.close()
        for answer in list(self.answers.values()):
            answer.fail(WorkerLost(text))
        for request_id in list(self._asked):
            self._settle(request_id, WorkerLost(text))


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
        "steps": beat.steps if beat else 0,
        "active_bytes": beat.active_bytes if beat else 0,
        "heartbeat_age_s": round(link.silence_s, 3) if link and beat else None,
        "model": beat.model.name if beat and beat.model else model,
    }


@dataclass(slots=True)
class WorkerPool:
    """All links, and the choice among them. Owner: the event loop."""

    affinity: CacheAffinity = field(default_factory=CacheAffinity)
    is_apart: bool = False  # of Submit
    links: dict[int, WorkerLink] = field(default_factory=dict)
    room: WaitingRequests = field(default_factory=WaitingRequests)
    _renewer: asyncio.Task[None] | None = None
    _known: dict[str, ModelFacts] = field(default_factory=dict)  # of models that were unloaded
    why_nobody: str = ""  # told to requests that find no worker; "" = it is loading
    on_ready: Callable[[WorkerLink], None] = lambda _: None  # a worker has loaded its model
    on_left: Callable[[Usage, ClientLeft], None] = lambda _usage, _left: None  # of each link

    def connect(
        self,
        worker_id: int,
        endpoint: str,
        keys: CurveKeys | None = None,
        models: Collection[str] = (),
    ) -> WorkerLink:
        """Open the line to a worker; `keys` and `models` as of WorkerLink."""
        assert worker_id not in self.links, worker_id
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew(), name="leases")
        link = self.links[worker_id] = WorkerLink(
            worker_id, endpoint, lambda: self._welcome(link), keys, models, self.is_apart
        )
        link.on_left = self.on_left
        return link

    def _welcome(self, link: WorkerLink) -> None:
        self.room.wake()
        self.on_ready(link)

    def disconnect(self, worker_id: int, text: str, *, keeps_cache: bool = False) -> None:
        """Close the line to a worker that is gone; `text` tells its clients why.

        Where it `keeps_cache` what was sent to it is sent to it again once it is back.
        """
        link = self.links.pop(worker_id, None)
        if link is not None:
            if link.heartbeat is not None and (facts := link.heartbeat.model) is not None:
                self._known[facts.name] = facts
            if not keeps_cache:
                self.affinity.forget(worker_id)
            link.close(text)

    def close(self) -> None:
        """This server stops: every client is told, nothing new is taken."""
        self.room.close()
        if self._renewer is not None:
            self._renewer.cancel()
        for worker_id in list(self.links):
            self.disconnect(worker_id, "The server is shutting down.")

    @property
    def facts(self) -> ModelFacts | None:
        """What is served, once a worker has loaded it."""
        return self.facts_of("")

    def facts_of(self, model: str) -> ModelFacts | None:
        """Return what was found out about `model`, "" = any, once a worker has loaded it."""
        now = [link.heartbeat.model for link in self.links.values() if link.heartbeat]
        rows = [row for row in now if row is not None] + list(self._known.values())
        return next((row for row in rows if model in ("", row.name)), None)

    @property
    def has_ready(self) -> bool:
        return any(link.is_ready for link in self.links.values())

    async def open(
        self, request: ParsedRequest, request_id: str, came_at: float | None = None
    ) -> AnswerStream:
        """Return the answer of a worker that has admitted `request`, named `request_id` from here.

        `came_at`: when its client asked (monotonic), where that is not now: all choices of a
        request are of one time, so that no switch of models comes between them.

        Where a worker dies before it admitted, another ready one is asked, once; where it is full,
        each other ready one. After Admitted nothing is sent twice.

        Raises:
            RequestError: refused by the worker, or nobody is there to take it.
        """
        lost: set[int] = set()
        full: set[int] = set()
        want = WaitingRequest(request.target, time.monotonic() if came_at is None else came_at)
        marks = marks_of(request.prompt, request.target) if request.use_kv_cache else []
        while True:
            link = await self._ready_link(want, marks, lost | full)
            answer = link.submit(request, request_id)
            self.affinity.remember(marks, link.worker_id)
            try:
                await answer.admitted()
            except WorkerLost:
                lost.add(link.worker_id)
                if len(lost) == ATTEMPTS_MAX or not self._takers(want, lost | full):
                    raise
            except RequestError as refusal:
                answer.close()  # one that said nothing in time is still at it
                full.add(link.worker_id)
                if refusal.code != Overloaded.CODE or not self._takers(want, lost | full):
                    raise
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    def queue(self, key: str = "") -> list[dict[str, Any]]:
        """Return who waits for a slot, each worker's next one first: ids, positions and ages.

        `key` is the digest of the API key whose requests are told; "" = everyone's.
        """
        return [row for link in self.links.values() for row in link.queue(key)]

    def prefills(self, key: str = "") -> list[dict[str, Any]]:
        """Return whose prompts are being read, and how far, in tokens; `key` as above."""
        return [
            answer.progress() | {"worker": link.worker_id}
            for link in self.links.values()
            for answer in link.answers.values()
            if answer.is_prefilling and key in ("", answer.key)
        ]

    async def count(self, request: ParsedRequest) -> int:
        """Return how many tokens `request`'s prompt is."""
        want = WaitingRequest(request.target, time.monotonic())
        marks = marks_of(request.prompt, request.target)
        link = await self._ready_link(want, marks, set())
        return await link.count(request.prompt)

    async def ask(
        self, what: ReportKind, about: str = "", key: str = ""
    ) -> dict[int, dict[str, Any] | RequestError]:
        """Return, by worker, what each ready one tells, or why it does not.

        All are asked at once, so that the whole takes STATUS_WAIT_S_MAX at most. `key` is the
        digest of the API key whose sessions and prompts are told; "" = everyone's.
        """

        async def told_by(link: WorkerLink) -> dict[str, Any] | RequestError:
            try:
                return await link.ask(what, about, key)
            except RequestError as error:
                return error

        links = [link for link in self.links.values() if link.is_ready]
        told = await asyncio.gather(*(told_by(link) for link in links))
        return {link.worker_id: row for link, row in zip(links, told, strict=True)}

    def _takers(self, want: WaitingRequest, lost: set[int]) -> list[WorkerLink]:
        """Return the links that `want` may be sent over, those of the workers in `lost` not."""
        links = self.links.values()
        taking = (link for link in links if link.takes(want.model, want.since))
        return [link for link in taking if link.worker_id not in lost]

    async def _ready_link(
        self, want: WaitingRequest, marks: list[bytes], lost: set[int]
    ) -> WorkerLink:
        """Return the worker to ask, waiting for one as long as that makes sense.

        Workers in `lost` are not asked: this request may be what killed them.
        """
        return await self.room.until(
            want, lambda: self.affinity.choose(self._takers(want, lost), marks)
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            for link in self.links.values():
                link.renew()
