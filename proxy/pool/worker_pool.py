"""Chooses a worker for each request, and sends the request there.

The pool has one link to each worker, on this machine or another. A request waits while no worker
can take it. If its worker dies or is full before admission, the request goes to another worker.
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

ReportKind = (  # kind of report that a Status asks for
    Literal["cache", "clear_cache", "unpin", "prompt", "sessions", "session", "tree"]
    | Literal["doctor", "check_again"]
)
WorkerReports = dict[int, dict[str, Any] | RequestError]  # report or error, by worker id

JUST_COUNT: Final = TokenQuery()
ATTEMPTS_MAX = 2  # a request that kills a worker must not kill every worker
COUNT_WAIT_S_MAX = 30.0
STATUS_WAIT_S_MAX = 5.0
MARKS_MAX: Final = 16_384
LOAD_GAP_MAX: Final = 4  # with more requests ahead, prefilling elsewhere is faster than waiting
READY_WAIT_S_MAX: Final = 1.0  # time for a worker that restarts by itself; clients retry
WAITING_MAX: Final = 256  # waiting requests, whose bodies are in memory; more are refused
LOADING: Final = "The model is still loading; try again in a few seconds."

# API key digest, model, and a session's name or a link (the digest of a conversation's prefix)
AffinityKey = tuple[str, str, str | bytes]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request that waits for a model."""

    model: str
    since: float  # when the request came (`awake_s`)


class ModelHost(Protocol):
    """Decides which model each worker loads. Owner: the event loop; no method blocks."""

    def wanted(self) -> None:
        """Look at the pool's `waiting` soon: a request waits for a model."""

    def wait_s(self, model: str) -> float:
        """Return how long a request may wait for `model`; 0 = waiting is in vain."""

    def unavailable_error(self, model: str) -> RequestError:
        """Return the error for a request that has waited `wait_s` for `model`."""

    def why_missing(self) -> str:
        """Return why no worker can load the default model now; "" = one can, or has loaded it."""

    def unload(self, model: str, api_key: str) -> None:
        """Unload `model` ("" = the default one) once it is idle, unless a request for it comes.

        `api_key` is the digest of the client's key. A model that another key has used recently
        stays loaded.
        """


def affinity_keys_of(prompt: Prompt, model: str = "") -> list[AffinityKey]:
    """Return the marks of `prompt`, by which a worker with its prefix is found: weakest first.

    They are the session, then each prefix of the conversation by its link. The API key and the
    model are part of every mark, so no two keys and no two models share a mark.
    """
    speaker = prompt.speaker
    names: list[str | bytes] = [speaker.session, *(name.link for name in prompt.names)]
    return [(speaker.key, model, name) for name in dict.fromkeys(names) if name]


class CacheAffinity:
    """Remembers which worker received which prompts. Owner: the event loop.

    Invariant: at most MARKS_MAX marks; the least recently used ones are evicted first.
    """

    def __init__(self, load_gap_max: int = LOAD_GAP_MAX) -> None:
        """`load_gap_max`: how many more requests the chosen worker may hold than the idlest one."""
        self._load_gap_max = load_gap_max
        # Kept for one key: the worker that has a conversation, by session name and prefix digests
        self.worker_ids: OrderedDict[AffinityKey, int] = OrderedDict()

    def choose(
        self, candidates: Iterable[WorkerLink], marks: list[AffinityKey]
    ) -> WorkerLink | None:
        """Return the candidate that received the strongest of `marks`; None without candidates.

        If no candidate received any, or that candidate is too busy, the least loaded one is
        returned; of equals, the one with the lowest id.
        """
        ready = {link.worker_id: link for link in candidates}
        idle = min(ready.values(), key=lambda link: (link.load, link.worker_id), default=None)
        if idle is None:
            return None
        known = (self.worker_ids.get(mark) for mark in reversed(marks))
        found = next(
            (
                ready[worker_id]
                for worker_id in known
                if worker_id is not None and worker_id in ready
            ),
            idle,
        )
        assert found.load >= idle.load, (found.worker_id, found.load, idle.load)
        return found if found.load - idle.load <= self._load_gap_max else idle

    def remember(self, marks: list[AffinityKey], worker_id: int) -> None:
        """Record that the worker received the prompt of `marks`; another worker keeps its marks.

        So a fork that goes elsewhere while its parent's worker is busy does not move the parent.
        """
        for mark in reversed(marks):  # marks that conversations share are evicted last
            self.worker_ids.setdefault(mark, worker_id)
            self.worker_ids.move_to_end(mark)
        while len(self.worker_ids) > MARKS_MAX:
            self.worker_ids.popitem(last=False)

    def forget(self, worker_id: int) -> None:
        """Drop the marks of a worker that has gone with its cache."""
        for mark in [mark for mark, other in self.worker_ids.items() if other == worker_id]:
            del self.worker_ids[mark]


@dataclass(slots=True)
class WorkerPool:
    """Keeps all links, chooses among them, and lets requests wait. Owner: the event loop.

    Invariants: `links` has one link for each connected worker, by the worker's id; `waiting` has
    one entry for each request that waits, at most WAITING_MAX.
    """

    affinity: CacheAffinity = field(default_factory=CacheAffinity)
    links: dict[int, WorkerLink] = field(default_factory=dict)
    waiting: list[ModelRequest] = field(default_factory=list)
    host: ModelHost = field(init=False)  # set by ModelSwapper; other pools choose no link
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False
    _renewer: asyncio.Task[None] | None = None
    _known: dict[str, ModelFacts] = field(default_factory=dict)  # facts of unloaded models
    unavailable_reason: str = ""  # error text while no worker is ready; "" = loading
    on_ready: Callable[[WorkerLink], None] = lambda _: None  # called once a worker is ready
    count_unread: CountUnread = lambda _answer, _usage: None  # callback for each link

    def connect(
        self,
        worker_id: int,
        endpoint: str,
        keys: CurveKeys | None = None,
        models: Collection[str] = (),
    ) -> WorkerLink:
        """Open the connection to a worker; `keys` and `models` are WorkerLink's."""
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
        """Let every waiting request look for a worker again."""
        self._changed.set()

    def disconnect(
        self,
        worker_id: int,
        text: str,
        *,
        keeps_cache: bool = False,
        errors: Mapping[str, RequestError] | None = None,
    ) -> None:
        """Close the connection to a worker that has gone; `text` is its clients' error.

        `errors` has other errors by request id. With `keeps_cache` the affinity to the worker
        stays for its return.
        """
        link = self.links.pop(worker_id, None)
        if link is not None:
            if link.heartbeat is not None and (facts := link.heartbeat.model) is not None:
                self._known[facts.name] = facts
            if not keeps_cache:
                self.affinity.forget(worker_id)
            link.close(text, errors)

    def close(self) -> None:
        """Fail every request and refuse new ones: this server stops."""
        self._is_closed = True
        self.wake()
        if self._renewer is not None:
            self._renewer.cancel()
        for worker_id in list(self.links):
            self.disconnect(worker_id, "The server is shutting down.")
        assert not self.links, list(self.links)

    def facts_of(self, model: str = "") -> ModelFacts | None:
        """Return the facts of `model` ("" = any), known once a worker has loaded it."""
        now = [link.heartbeat.model for link in self.links.values() if link.heartbeat]
        known = (facts for facts in (*now, *self._known.values()) if facts is not None)
        return next((facts for facts in known if model in ("", facts.name)), None)

    async def open(
        self, request: ParsedRequest, request_id: str, came_at: float | None = None
    ) -> AnswerStream:
        """Return the answer of a worker that has admitted `request` under `request_id`.

        `came_at`: when the client sent it (`awake_s`); None = now. All choices of a request have
        the same time, so that no switch of models comes between them.

        If a worker dies before admission, the request goes to one other ready worker; if workers
        are full, to each other ready one. After Admitted it is never sent again.

        Raises:
            RequestError: the worker refused, or no worker can take it.
        """
        lost: set[int] = set()
        full: set[int] = set()
        model_request = ModelRequest(request.target, awake_s() if came_at is None else came_at)
        marks = affinity_keys_of(request.prompt, request.served_as) if request.use_kv_cache else []
        while True:
            assert len(lost) < ATTEMPTS_MAX, (request_id, lost)
            link = await self._ready_link(model_request, marks, lost | full)
            assert link.worker_id not in lost | full, (request_id, link.worker_id, lost, full)
            answer = link.submit(request, request_id)
            self.affinity.remember(marks, link.worker_id)
            try:
                await answer.admitted()
            except WorkerLost:
                lost.add(link.worker_id)
                if len(lost) == ATTEMPTS_MAX or not self._eligible_links(
                    model_request, lost | full
                ):
                    raise
            except RequestError as refusal:
                answer.close()  # a worker that did not admit in time may still be rendering
                full.add(link.worker_id)
                if refusal.code != Overloaded.CODE or not self._eligible_links(
                    model_request, lost | full
                ):
                    raise
            except BaseException:
                answer.close()
                raise
            else:
                return answer

    async def load(self, model: str) -> None:
        """Wait until a worker has loaded `model`; "" = the default one. Raises: RequestError."""
        await self._ready_link(ModelRequest(model, awake_s()), [], set())

    def queue(self, api_key: str = "") -> list[dict[str, Any]]:
        """Return the requests that wait for a slot, in each worker's order: ids, positions, ages.

        `api_key` is the digest of the key whose requests are listed; "" = all keys.
        """
        return [
            {
                "request_id": request_id,
                "worker": link.worker_id,
                "position": position,
                **answer.requester_fields(),
            }
            for link in self.links.values()
            if link.heartbeat is not None
            for position, request_id in enumerate(link.heartbeat.queue, start=1)
            if (answer := link.answers.get(request_id)) is not None
            and api_key in ("", answer.api_key)
        ]

    def prefills(self, api_key: str = "") -> list[dict[str, Any]]:
        """Return the requests that are prefilling, with their progress; `api_key` as in `queue`."""
        return [
            answer.progress() | {"worker": link.worker_id}
            for link in self.links.values()
            for answer in link.answers.values()
            if answer.is_prefilling and api_key in ("", answer.api_key)
        ]

    def with_requesters(self, entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `entries`, each about a request at a `worker`, with the fields of its client.

        Entries of requests that have ended are left out.
        """
        return [
            entry | answer.requester_fields()
            for entry in entries
            if (link := self.links.get(entry["worker"])) is not None
            and (answer := link.answers.get(entry["request_id"])) is not None
        ]

    async def count(self, request: ParsedRequest, query: TokenQuery = JUST_COUNT) -> Counted:
        """Return how many tokens `request`'s prompt has, and what else `query` asks."""
        marks = affinity_keys_of(request.prompt, request.served_as)
        link = await self._ready_link(ModelRequest(request.target, awake_s()), marks, set())
        link.uses.record(request.prompt.speaker.key)
        message = Count(uuid.uuid4().hex, request.prompt, query)
        return await link.reply(message, Counted, COUNT_WAIT_S_MAX)

    async def ask(self, what: ReportKind, about: str = "", api_key: str = "") -> WorkerReports:
        """Return the report of each ready worker, or its error, by worker id.

        All workers are asked at once, so the call takes at most STATUS_WAIT_S_MAX. `api_key` is
        the digest of the key whose sessions and prompts are reported; "" = all keys.
        """

        async def reply_of(link: WorkerLink) -> dict[str, Any] | RequestError:
            try:
                message = Status(uuid.uuid4().hex, what, about, api_key)
                return (await link.reply(message, Told, STATUS_WAIT_S_MAX)).body
            except RequestError as error:
                return error

        links = [link for link in self.links.values() if link.is_ready]
        replies = await asyncio.gather(*(reply_of(link) for link in links))
        return {link.worker_id: reply for link, reply in zip(links, replies, strict=True)}

    def _eligible_links(self, model_request: ModelRequest, excluded: set[int]) -> list[WorkerLink]:
        """Return the links of workers that can take `model_request` now, without `excluded`."""
        return [
            link
            for link in self.links.values()
            if link.worker_id not in excluded
            and link.takes(model_request.model, model_request.since)
        ]

    async def _ready_link(
        self, model_request: ModelRequest, marks: list[AffinityKey], excluded: set[int]
    ) -> WorkerLink:
        """Return the link to the best worker; wait for one no longer than the host allows.

        Workers in `excluded` are left out: this request may have killed them.

        Raises:
            RequestError: no worker was ready in time, or too many requests wait already.
        """
        if len(self.waiting) >= WAITING_MAX and not self._eligible_links(model_request, excluded):
            raise Overloaded(
                f"{len(self.waiting)} requests wait for a worker and this server holds "
                f"{WAITING_MAX}. Try again in a few seconds."
            )
        began = awake_s()
        self.waiting.append(model_request)
        try:
            while not self._is_closed:
                link = self.affinity.choose(self._eligible_links(model_request, excluded), marks)
                if link is not None:
                    return link
                self.host.wanted()
                wait_s = began + self.host.wait_s(model_request.model) - awake_s()
                if wait_s <= 0:
                    break
                assert len(self.waiting) <= WAITING_MAX, len(self.waiting)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
        finally:
            self.waiting.remove(model_request)
        if self._is_closed:
            raise WorkerLost("The server is shutting down.")
        raise self.host.unavailable_error(model_request.model)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_RENEW_S)
            for link in self.links.values():
                link.renew()
