"""Orders the requests that wait for a slot, starts their disk reads, and frees memory.

Sessions get slots in turn, so that no session waits for the whole queue of another.
"""

import heapq
import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from hearth.shared.wire_messages import Failed
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.kv.layer_adapters import STEP
from hearth.worker.schedule.memory_guard import AnyKVManager
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.scheduler_config import SchedulerConfig


def in_queue_order(waiting: Iterable[Request], slots_given: int) -> Iterator[Request]:
    """Yield the waiting requests in the order in which they get slots.

    `waiting` is in the order of arrival; `slots_given` counts the slots given so far. Requests of
    one `queue_name` form a queue. The queue whose last slot is the longest ago is next, with
    its oldest request. A new queue counts like a queue that has just got a slot. So a request at
    the head of its queue waits for at most one slot of each other queue, and no request starves.
    """
    queues: dict[str, deque[tuple[int, Request]]] = {}
    for number, request in enumerate(waiting):
        queues.setdefault(request.queue_name, deque()).append((number, request))
    heads = [(queue[0][1].queue_order, queue[0][0], queue) for queue in queues.values()]
    heapq.heapify(heads)
    while heads:
        _, _, queue = heapq.heappop(heads)
        _, request = queue.popleft()
        slots_given += 1
        if queue:
            heapq.heappush(heads, (max(slots_given, queue[0][1].queue_order), queue[0][0], queue))
        yield request


def record_slot_given(chosen: Request, waiting: Iterable[Request], slots_given: int) -> int:
    """Record that `chosen` got a slot; return how many slots have been given now."""
    assert chosen.queue_order <= slots_given, (chosen.queue_order, slots_given)
    for request in waiting:
        if request.queue_name == chosen.queue_name:
            request.queue_order = slots_given + 1
    return slots_given + 1


RECALLS_MAX: Final = 2  # disk reads per request: on arrival, and after an eviction of that KV
SPARE_ROWS: Final = 512  # answer tokens that fit into a new slot; slots grow later
GROWTH_ROWS: Final = 2_048  # tokens that each answer is expected to grow by

log = logging.getLogger(__name__)


class Admission:
    """Recalls KV and frees memory for the requests that wait. Owner: the inference thread.

    Invariant: a request waits for the disk at most `RECALLS_MAX` times, and never for KV that was
    stored before the cache was last emptied.
    """

    def __init__(
        self,
        kv_manager: AnyKVManager,
        decoder: Decoder,
        config: SchedulerConfig,
        counts: "Counter[str]",
    ) -> None:
        """`counts` counts recalls and refusals; the scheduler counts further events."""
        self._kv_manager = kv_manager
        self._uncached = kv_manager.uncached
        self._decoder = decoder
        self._config = config
        self._counts = counts
        self._epoch = 0  # how often the cache was emptied

    def kv_manager_of(self, request: Request) -> AnyKVManager:
        return self._kv_manager if request.uses_cache else self._uncached

    # ------------------------------------------------------------ the disk

    def start_recall(self, request: Request) -> bool:
        """Start reading the prompt's KV from disk; return whether the request must wait."""
        kept, query, epoch = request.kept, request.query, self._epoch
        assert kept.recall is None and kept.recalls < RECALLS_MAX, kept.recalls
        kept.recall = self.kv_manager_of(request).recall(
            query, lambda records: self._config.post(RecallDone(request, records, epoch))
        )
        if kept.recall is None:
            return False
        kept.recalls += 1
        kept.tokens = kept.recall.position
        return True

    def restart_recall(self, request: Request) -> bool:
        """Read the prompt's KV from disk again if KV was evicted since the request arrived.

        Return whether the request waits for the disk.
        """
        kept = request.kept
        assert kept.recall is None, request.request_id
        is_less = self.kv_manager_of(request).plan(request.query).position < kept.tokens
        return is_less and kept.recalls < RECALLS_MAX and self.start_recall(request)

    def take_recalled(self, done: RecallDone) -> None:
        """Take in the KV that the disk thread read; the request stops waiting for the disk."""
        kept, query = done.request.kept, done.request.query
        assert done.epoch <= self._epoch, (done.epoch, self._epoch)
        if done.epoch != self._epoch:  # the cache was emptied meanwhile
            kept.recall = None
            return
        tokens = self._kv_manager.take_in(done.records, query)
        if kept.recall is None:  # the request stopped waiting; other requests may use this KV
            self._counts["recalls_late"] += 1
            return
        kept.recall = None
        kept.recalled_tokens += tokens
        kept.tokens = self._kv_manager.plan(query).position

    def waits_for_disk(self, request: Request) -> bool:
        """Return whether the disk still reads for a request; a late read is abandoned."""
        kept = request.kept
        if kept.recall is None or not kept.recall.is_late:
            return kept.recall is not None
        self._counts["recalls_given_up"] += 1
        kept.recall, kept.recalls = None, RECALLS_MAX
        kept.tokens = self._kv_manager.plan(request.query).position
        return False

    def forget(self) -> None:
        """Drop the results of disk reads in flight, because the cache is emptied."""
        self._epoch += 1

    # ------------------------------------------------------------ memory

    def makes_room(
        self, request: Request, running: Collection[Request], depth: int
    ) -> tuple[bool, int]:
        """Free memory for a slot; return whether the slot fits, and how many bytes it takes.

        `running` are the requests that have a slot. Memory for the expected growth of their
        answers stays free, so that answers that begin at once do not fill all memory. `depth` is
        the length in tokens of the longest prompt in prefill, this prompt included.
        """
        kv_manager, query, rows = self.kv_manager_of(request), request.query, rows_of(request)
        own_share = self._own_share(request, running)
        # A first forward allocates states and windows; the slot has the KV rows already.
        promised = sum(
            self._uncached.unwritten_bytes(rows_of(other))
            for other in running
            if other.position <= other.cached_tokens
        )
        growth = sum(map(self._growth_bytes, [*running, request])) if running else 0
        return self._config.memory.admits(
            self._kv_manager,
            query,
            now=lambda: round((1 + own_share) * kv_manager.slot_cost(query, rows)) + promised,
            cold=round((1 + own_share) * self._uncached.slot_cost(query, rows)) + promised,
            growth=growth,
            copied=lambda: 0 if running else kv_manager.copied_bytes(query),
            is_last=not running,
            depth=depth,
        )

    def _own_share(self, request: Request, running: Collection[Request]) -> float:
        """Return the share (0 to 1) of a request's KV that joining a batch would copy.

        A shared trunk is not copied. A request that runs alone copies nothing.
        """
        if not running or not self._decoder.is_mergeable:
            return 0
        if not self._decoder.shares_trunks:
            return 1
        trunk = max(_shared_tokens(other, request) for other in running)
        if trunk < self._decoder.trunk_tokens_min:
            return 1
        cold_bytes = self._uncached.cold_bytes
        # Each batch row has its own windows and states.
        spared = cold_bytes(trunk) - self._uncached.unwritten_bytes(trunk)
        return 1 - max(0, spared) / max(1, cold_bytes(rows_of(request)))

    def _growth_bytes(self, request: Request) -> int:
        """Return the bytes that the answer is still expected to take."""
        position = request.prompt_tokens + request.completion_tokens
        end = min(request.prompt_tokens + request.tokens_max, position + GROWTH_ROWS)
        return self._uncached.cold_bytes(end + STEP) - self._uncached.cold_bytes(position)

    def refuse(self, request: Request, cost: int) -> Failed:
        """Return the refusal of a prompt that does not fit after all kept KV was released."""
        assert request.slot is None and cost >= 0, (request.request_id, cost)
        self._counts["memory_refusals"] += 1
        text = self._config.memory.refusal(request.prompt_tokens, cost)
        log.warning("no memory request=%s %s", request.request_id, text)
        return Failed(request.request_id, 400, "context_length_exceeded", text)


def rows_of(request: Request) -> int:
    """Return the number of tokens that a request's slot has room for at first."""
    return request.prompt_tokens + min(request.tokens_max, SPARE_ROWS)


def prefills_for(leader: Request, request: Request) -> bool:
    """Return whether `leader` is prefilling tokens that `request` would have to prefill too."""
    if not (leader.uses_cache and request.uses_cache):
        return False
    return _shared_tokens(leader, request) > max(leader.position, request.kept.tokens)


def _shared_tokens(other: Request, request: Request) -> int:
    """Return the last cut, as a position in tokens, up to which two prompts are the same."""
    shared = request.kept.shared.get(other.request_id)
    if shared is None:
        other_names = set(other.query.names)
        own_cuts = zip(request.query.cuts, request.query.names, strict=True)
        shared = max((cut for cut, name in own_cuts if name in other_names), default=0)
        request.kept.shared[other.request_id] = shared
    return shared
