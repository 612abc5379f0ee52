"""Chooses the worker of each request, and sends it there.

The pool has one link to each worker, on this machine or another. A request that no worker can take
now waits; one whose worker dies or is full before it admitted goes to another one.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.pool.cache_affinity import CacheAffinity, Mark, marks_of
from hearth.proxy.pool.waiting_requests import ModelRequest, WaitingRequests
from hearth.proxy.pool.worker_link import CountUnread, ReportKind, WorkerLink
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import Overloaded, RequestError, WorkerLost
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Counted, ModelFacts, TokenQuery
from hearth.shared.zmq_transport import LEASE_RENEW_S, CurveKeys

WorkerReports = dict[int, dict[str, Any] | RequestError]  # by worker id: its report, or why not

JUST_COUNT: Final = TokenQuery()
ATTEMPTS_MAX = 2  # a request that kills a worker must not kill them all


@dataclass(slots=True)
class WorkerPool:
    """All links, and the choice among them. Owner: the event loop.

    Invariant: `links` has one link for each worker that is connected, by the worker's id.
    """

    affinity: CacheAffinity = field(default_factory=CacheAffinity)
    links: dict[int, WorkerLink] = field(default_factory=dict)
    waiting: WaitingRequests = field(default_factory=WaitingRequests)
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
        self.waiting.wake()
        self.on_ready(link)

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
        self.waiting.close()
        if self._renewer is not None:
            self._renewer.cancel()
        for worker_id in list(self.links):
            self.disconnect(worker_id, "The server is shutting down.")
        assert not self.links, list(self.links)

    def facts_of(self, model: str = "") -> ModelFacts | None:
        """Return what was found out about `model`, "" = any, once a worker has loaded it."""
        now = [link.heartbeat.model for link in self.links.values() if link.heartbeat]
        rows = [row for row in now if row is not None] + list(self._known.values())
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
        waiting = ModelRequest(request.target, awake_s() if came_at is None else came_at)
        marks = marks_of(request.prompt, request.served_as) if request.use_kv_cache else []
        while True:
            assert len(lost) < ATTEMPTS_MAX, (request_id, lost)
            link = await self._ready_link(waiting, marks, lost | full)
            assert link.worker_id not in lost | full, (request_id, link.worker_id, lost, full)
            answer = link.submit(request, request_id)
            self.affinity.remember(marks, link.worker_id)
            try:
                await answer.admitted()
            except WorkerLost:
                lost.add(link.worker_id)
                if len(lost) == ATTEMPTS_MAX or not self._takers(waiting, lost | full):
                    raise
            except RequestError as refusal:
                answer.close()  # one that said nothing in time is still at it
                full.add(link.worker_id)
                if refusal.code != Overloaded.CODE or not self._takers(waiting, lost | full):
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
        return [row for link in self.links.values() for row in link.queue(key)]

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
        answers = {
            (link.worker_id, request_id): answer
            for link in self.links.values()
            for request_id, answer in link.answers.items()
        }
        known = ((row, answers.get((row["worker"], row["request_id"]))) for row in rows)
        return [row | answer.asked_by() for row, answer in known if answer is not None]

    async def count(self, request: ParsedRequest, query: TokenQuery = JUST_COUNT) -> Counted:
        """Return how many tokens `request`'s prompt is, and what else `query` asks."""
        waiting = ModelRequest(request.target, awake_s())
        marks = marks_of(request.prompt, request.served_as)
        link = await self._ready_link(waiting, marks, set())
        return await link.count(request.prompt, query)

    async def ask(self, what: ReportKind, about: str = "", key: str = "") -> WorkerReports:
        """Return, by worker, what each ready one tells, or why it does not.

        All are asked at once, so that the whole takes STATUS_WAIT_S_MAX at most. `key` is the
        digest of the API key whose sessions and prompts are told; "" = everyone's.
        """

        async def reply_of(link: WorkerLink) -> dict[str, Any] | RequestError:
            try:
                return await link.ask(what, about, key)
            except RequestError as error:
                return error

        links = [link for link in self.links.values() if link.is_ready]
        replies = await asyncio.gather(*(reply_of(link) for link in links))
        return {link.worker_id: reply for link, reply in zip(links, replies, strict=True)}

    def _takers(self, waiting: ModelRequest, lost: set[int]) -> list[WorkerLink]:
        """Return the links that `waiting` may be sent over, those of the workers in `lost` not."""
        links = self.links.values()
        taking = (link for link in links if link.takes(waiting.model, waiting.since))
        return [link for link in taking if link.worker_id not in lost]

    async def _ready_link(
        self, waiting: ModelRequest, marks: list[Mark], lost: set[int]
    ) -> WorkerLink:
        """Return the worker to ask, waiting for one as long as that makes sense.

        Workers in `lost` are not asked: this request may be what killed them.
        """
        return await self.waiting.wait_for_worker(
            waiting, lambda: self.affinity.choose(self._takers(waiting, lost), marks)
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            for link in self.links.values():
                link.renew()
