"""Chooses the worker of each request, and sends it there.

The pool has one link to each worker, on this machine or another. A request that no worker can take
now waits; one whose worker dies or is full before it admitted goes to another one.
"""

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from hearth.proxy.pool.worker_link import AnswerStream, CountUnread, WorkerLink
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import Overloaded, RequestError, WorkerLost
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Count, Counted, ModelFacts, Prompt, Status, TokenQuery, Told
from hearth.shared.zmq_transport import LEASE_RENEW_S, CurveKeys

ReportKind = (  # of Status
    Literal["cache", "clear_cache", "unpin", "prompt", "sessions", "session", "tree"]
    | Literal["doctor", "check_again"]
)
WorkerReports = dict[int, dict[str, Any] | RequestError]  # by worker id: its report, or why not

JUST_COUNT: Final = TokenQuery()
ATTEMPTS_MAX = 2  # a request that kills a worker must not kill them all
COUNT_WAIT_S_MAX = 30.0
STATUS_WAIT_S_MAX = 5.0
MARKS_MAX: Final = 16_384
LOAD_GAP_MAX: Final = 4  # beyond that reading a prompt anew is sooner done than waiting
READY_WAIT_S_MAX: Final = 1.0  # for a worker that starts unasked; clients come back by themselves
WAITING_MAX: Final = 256  # each holds its body; more are told to come back
LOADING: Final = "The model is still loading; try again in a few seconds."

Mark = tuple[str, str, str | bytes]  # an API key's digest, a model, a session or a link


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request that waits for a model."""

    model: str
    since: float  # by `awake_s`


class ModelHost(Protocol):
    """Gives models to workers. Owner: the event loop; nothing here blocks."""

    def wanted(self) -> None:
        """A request waits for a model: it is among the pool's `waiting`."""

    def wait_s(self, model: str) -> float:
        """Return how long a request may wait for `model`; 0 = in vain."""

    def why_nobody(self, model: str) -> RequestError:
        """Return what is told to a request that has waited that long."""

    def why_missing(self) -> str:
        """Return why no worker can load the default model now; "" = one can, or has it."""

    def unload(self, model: str, key: str) -> None:
        """Have `model`, "" = the default one, unloaded once it is idle, unless it is asked for.

        `key` is the digest of who wishes so; what another has used of late stays.
        """


def marks_of(prompt: Prompt, model: str = "") -> list[Mark]:
    """Return what a worker can be found by that was sent `prompt` for `model`: weakest first.

    First the session, then each prefix of the conversation, by its link; nothing of one API key's
    is found by another's, nor of one model's.
    """
    speaker = prompt.speaker
    names: list[str | bytes] = [speaker.session, *(name.link for name in prompt.names)]
    return [(speaker.key, model, name) for name in dict.fromkeys(names) if name]


class CacheAffinity:
    """Remembers which worker was sent what. Owner: the event loop.

    Invariant: at most MARKS_MAX marks; the ones that were not sent for longest go first.
    """

    def __init__(self, load_gap_max: int = LOAD_GAP_MAX) -> None:
        """`load_gap_max`: requests that a worker may hold beyond the least loaded one's."""
        self._load_gap_max = load_gap_max
        # Kept for one key: which worker has a conversation, by its session's name and digests
        self.worker_ids: OrderedDict[Mark, int] = OrderedDict()

    def choose(self, candidates: Iterable[WorkerLink], marks: list[Mark]) -> WorkerLink | None:
        """Return the candidate that was sent the strongest of `marks`; None where there is none.

        It is the least loaded one, the lowest id among equals, where none was sent any, and where
        the one that was is too busy.
        """
        ready = {row.worker_id: row for row in candidates}
        idle = min(ready.values(), key=lambda row: (row.load, row.worker_id), default=None)
        if idle is None:
            return None
        known = (self.worker_ids.get(mark) for mark in reversed(marks))
        found = next((ready[row] for row in known if row is not None and row in ready), idle)
        assert found.load >= idle.load, (found.worker_id, found.load, idle.load)
        return found if found.load - idle.load <= self._load_gap_max else idle

    def remember(self, marks: list[Mark], worker_id: int) -> None:
        """Note that the worker was sent what `marks` stand for, unless another was before.

        A fork that is sent elsewhere because its parent's worker is busy takes nothing from there.
        """
        for mark in reversed(marks):  # so that what conversations share is kept longest
            self.worker_ids.setdefault(mark, worker_id)
            self.worker_ids.move_to_end(mark)
        while len(self.worker_ids) > MARKS_MAX:
            self.worker_ids.popitem(last=False)

    def forget(self, worker_id: int) -> None:
        """Drop what was noted of a worker that is gone, and its cache with it."""
        for mark in [mark for mark, row in self.worker_ids.items() if row == worker_id]:
            del self.worker_ids[mark]


@dataclass(slots=True)
class WorkerPool:
    """All links, the choice among them, and who waits for one. Owner: the event loop.

    Invariants: `links` has one link for each worker that is connected, by the worker's id;
    `waiting` has one row for each request that waits, at most WAITING_MAX.
    """

    affinity: CacheAffinity = field(default_factory=CacheAffinity)
    links: dict[int, WorkerLink] = field(default_factory=dict)
    waiting: list[ModelRequest] = field(default_factory=list)
    host: ModelHost = field(init=False)  # it says so itself, before the first request
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False
    _renewer: asyncio.Task[None] | None = None
    _known: dict[str, ModelFacts] = field(default_factory=dict)  # of models that were unloaded
    why_nobody: str = ""  # told to requests that find no worker; "" = it is loading
    on_ready: Callable[[WorkerLink], None] = lambda _: None  # a worker has loaded its model
    count_unread: CountUnread = lambda _answer, _usage: None  # of each link

    def connect(
        self,
        worker_id: int,
        endpoint: str,
        keys: CurveKeys | None = None,
        models: Collection[str] = (),
    ) -> WorkerLink:
        """Open the connection to a worker; `keys` and `models` as of WorkerLink."""
        assert worker_id not in self.links, worker_id
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew(), name="leases")
        link = self.links[worker_id] = WorkerLink(
            worker_id, endpoint, lambda: self._link_ready(link), keys, models
        )
        link.count_unread = self.count_unread
        return link

    def _link_ready(self, link: WorkerLink) -> None:
        self.wake()
        self.on_ready(link)

    def wake(self) -> None:
        """Have everyone who waits look again."""
        self._changed.set()

    def disconnect(
        self,
        worker_id: int,
        text: str,
        *,
        keeps_cache: bool = False,
        errors: Mapping[str, RequestError] | None = None,
    ) -> None:
        """Close the connection to a worker that is gone; `text` tells its clients why.

        The requests with the ids of `errors` are told those. Where it `keeps_cache` what was sent
        to it is sent to it again once it is back.
        """
        link = self.links.pop(worker_id, None)
        if link is not None:
            if link.heartbeat is not None and (facts := link.heartbeat.model) is not None:
                self._known[facts.name] = facts
            if not keeps_cache:
                self.affinity.forget(worker_id)
            link.close(text, errors)

    def close(self) -> None:
        """This server stops: every client is told, nothing new is taken."""
        self._is_closed = True
        self.wake()
        if self._renewer is not None:
            self._renewer.cancel()
        for worker_id in list(self.links):
            self.disconnect(worker_id, "The server is shutting down.")
        assert not self.links, list(self.links)

    def facts_of(self, model: str = "") -> ModelFacts | None:
        """Return what was found out about `model`, "" = any, once a worker has loaded it."""
        now = [link.heartbeat.model for link in self.links.values() if link.heartbeat]
        rows = (row for row in (*now, *self._known.values()) if row is not None)
        return next((row for row in rows if model in ("", row.name)), None)

    async def open(
        self, request: ParsedRequest, request_id: str, came_at: float | None = None
    ) -> AnswerStream:
        """Return the answer of a worker that has admitted `request`, named `request_id` from here.

        `came_at`: when its client asked (`awake_s`), where that is not now: all choices of a
        request are of one time, so that no switch of models comes between them.

        Where a worker dies before it admitted, another ready one is asked, once; where it is full,
        each other ready one. After Admitted nothing is sent twice.

        Raises:
            RequestError: refused by the worker, or nobody is there to take it.
        """
        lost: set[int] = set()
        full: set[int] = set()
        asked = ModelRequest(request.target, awake_s() if came_at is None else came_at)
        marks = marks_of(request.prompt, request.served_as) if request.use_kv_cache else []
        while True:
            assert len(lost) < ATTEMPTS_MAX, (request_id, lost)
            link = await self._ready_link(asked, marks, lost | full)
            assert link.worker_id not in lost | full, (request_id, link.worker_id, lost, full)
            answer = link.submit(request, request_id)
            self.affinity.remember(marks, link.worker_id)
            try:
                await answer.admitted()
            except WorkerLost:
                lost.add(link.worker_id)
                if len(lost) == ATTEMPTS_MAX or not self._takers(asked, lost | full):
                    raise
            except RequestError as refusal:
                answer.close()  # one that said nothing in time is still at it
                full.add(link.worker_id)
                if refusal.code != Overloaded.CODE or not self._takers(asked, lost | full):
                    raise
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    async def load(self, model: str) -> None:
        """Wait until a worker has `model`, "" = the only one. Raises: RequestError."""
        await self._ready_link(ModelRequest(model, awake_s()), [], set())

    def queue(self, key: str = "") -> list[dict[str, Any]]:
        """Return who waits for a slot, each worker's next one first: ids, positions and ages.

        `key` is the digest of the API key whose requests are told; "" = everyone's.
        """
        return [
            {
                "request_id": request_id,
                "worker": link.worker_id,
                "position": position,
                **answer.asked_by(),
            }
            for link in self.links.values()
            if link.heartbeat is not None  # as it told last
            for position, request_id in enumerate(link.heartbeat.queue, start=1)
            if (answer := link.answers.get(request_id)) is not None and key in ("", answer.key)
        ]

    def prefills(self, key: str = "") -> list[dict[str, Any]]:
        """Return whose prompts are being read, and how far, in tokens; `key` as above."""
        return [
            answer.progress() | {"worker": link.worker_id}
            for link in self.links.values()
            for answer in link.answers.values()
            if answer.is_prefilling and key in ("", answer.key)
        ]

    def with_askers(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows about requests, each with its `worker`, with who asked them.

        Those that have ended meanwhile are left out.
        """
        return [
            row | answer.asked_by()
            for row in rows
            if (link := self.links.get(row["worker"])) is not None
            and (answer := link.answers.get(row["request_id"])) is not None
        ]

    async def count(self, request: ParsedRequest, query: TokenQuery = JUST_COUNT) -> Counted:
        """Return how many tokens `request`'s prompt is, and what else `query` asks."""
        marks = marks_of(request.prompt, request.served_as)
        link = await self._ready_link(ModelRequest(request.target, awake_s()), marks, set())
        link.uses.note(request.prompt.speaker.key)
        message = Count(uuid.uuid4().hex, request.prompt, query)
        return await link.reply(message, Counted, COUNT_WAIT_S_MAX)

    async def ask(self, what: ReportKind, about: str = "", key: str = "") -> WorkerReports:
        """Return, by worker, what each ready one tells, or why it does not.

        All are asked at once, so that the whole takes STATUS_WAIT_S_MAX at most. `key` is the
        digest of the API key whose sessions and prompts are told; "" = everyone's.
        """

        async def reply_of(link: WorkerLink) -> dict[str, Any] | RequestError:
            try:
                message = Status(uuid.uuid4().hex, what, about, key)
                return (await link.reply(message, Told, STATUS_WAIT_S_MAX)).body
            except RequestError as error:
                return error

        links = [link for link in self.links.values() if link.is_ready]
        replies = await asyncio.gather(*(reply_of(link) for link in links))
        return {link.worker_id: reply for link, reply in zip(links, replies, strict=True)}

    def _takers(self, asked: ModelRequest, lost: set[int]) -> list[WorkerLink]:
        """Return the links that `asked` may be sent over, those of the workers in `lost` not."""
        return [
            link
            for link in self.links.values()
            if link.worker_id not in lost and link.takes(asked.model, asked.since)
        ]

    async def _ready_link(
        self, asked: ModelRequest, marks: list[Mark], lost: set[int]
    ) -> WorkerLink:
        """Return the worker to ask, waiting for one as long as the host says.

        Workers in `lost` are not asked: this request may be what killed them.

        Raises:
            RequestError: there was none in time, or too many wait already.
        """
        if len(self.waiting) >= WAITING_MAX and not self._takers(asked, lost):
            raise Overloaded(
                f"{len(self.waiting)} requests wait for a worker and this server holds "
                f"{WAITING_MAX}. Try again in a few seconds."
            )
        began = awake_s()
        self.waiting.append(asked)
        try:
            while not self._is_closed:
                link = self.affinity.choose(self._takers(asked, lost), marks)
                if link is not None:
                    return link
                self.host.wanted()
                wait_s = began + self.host.wait_s(asked.model) - awake_s()
                if wait_s <= 0:
                    break
                assert len(self.waiting) <= WAITING_MAX, len(self.waiting)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
        finally:
            self.waiting.remove(asked)
        if self._is_closed:
            raise WorkerLost("The server is shutting down.")
        raise self.host.why_nobody(asked.model)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            for link in self.links.values():
                link.renew()
