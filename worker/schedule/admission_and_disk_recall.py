"""Orders the requests that wait for a slot, has their KV read from disk, and frees memory.

Sessions take turns, so that none waits for another's whole queue.
"""

import heapq
import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from hearth.shared.wire_messages import Failed
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.kv.layer_adapters import STEP
from hearth.worker.schedule.memory_guard import AnyKVManager, PromptCost
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.scheduler_config import SchedulerConfig


def in_turn(waiting: Iterable[Request], turn: int) -> Iterator[Request]:
    """Yield `waiting`, which is in the order of arrival, in the order in which slots go to it.

    `turn` is how many slots have been given. The asker whose last one is the longest ago is next,
    with its oldest request; one that comes anew comes as if it had been given a slot just then.
    So each asker has one slot at most between its arrival and its turn, and nobody is overtaken
    for ever.
    """
    queues: dict[str, deque[tuple[int, Request]]] = {}
    for number, each in enumerate(waiting):
        queues.setdefault(each.asker, deque()).append((number, each))
    heads = [(queue[0][1].turn, queue[0][0], queue) for queue in queues.values()]
    heapq.heapify(heads)
    while heads:
        _, _, queue = heapq.heappop(heads)
        _, each = queue.popleft()
        turn += 1
        if queue:
            heapq.heappush(heads, (max(turn, queue[0][1].turn), queue[0][0], queue))
        yield each


def give_turn(to: Request, waiting: Iterable[Request], turn: int) -> int:
    """Note that `to` was given a slot, and return how many have been given now."""
    assert to.turn <= turn, (to.turn, turn)
    for each in waiting:
        if each.asker == to.asker:
            each.turn = turn + 1
    return turn + 1


RECALLS_MAX: Final = 2  # waits for the disk: on arrival, and if that was evicted before its turn
SPARE_ROWS: Final = 512  # a slot has room for so much of an answer; it grows for a longer one
GROWTH_ROWS: Final = 2_048  # tokens that each answer is thought to grow by while another begins

log = logging.getLogger(__name__)


class Admission:
    """Recalls KV and frees memory for the requests that wait. Owner: the inference thread.

    Invariant: a request waits for the disk at most `RECALLS_MAX` times, and only for KV of the
    cache as it is since it was emptied last.
    """

    def __init__(
        self,
        kv_manager: AnyKVManager,
        decoder: Decoder,
        config: SchedulerConfig,
        counts: "Counter[str]",
    ) -> None:
        """`counts` counts recalls and refusals; the scheduler's counts are in it too."""
        self._kv_manager = kv_manager
        self._uncached = kv_manager.uncached
        self._decoder = decoder
        self._config = config
        self._counts = counts
        self._epoch = 0  # times that the cache was emptied

    def kv_manager_of(self, request: Request) -> AnyKVManager:
        return self._kv_manager if request.uses_cache else self._uncached

    # ------------------------------------------------------------ the disk

    def ask_disk(self, request: Request) -> bool:
        """Start reading from disk what the prompt needs; say whether it waits for that."""
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

    def asks_again(self, request: Request) -> bool:
        """Start reading from disk what was kept of a prompt when it came and was evicted since."""
        kept = request.kept
        assert kept.recall is None, request.request_id
        is_less = self.kv_manager_of(request).plan(request.query).position < kept.tokens
        return is_less and kept.recalls < RECALLS_MAX and self.ask_disk(request)

    def take_recalled(self, done: RecallDone) -> None:
        """Take in what was read from disk; the request it was read for may have a slot now."""
        kept, query = done.request.kept, done.request.query
        assert done.epoch <= self._epoch, (done.epoch, self._epoch)
        if done.epoch != self._epoch:  # the cache was emptied meanwhile
            kept.recall = None
            return
        tokens = self._kv_manager.take_in(done.records, query)
        if kept.recall is None:  # it has given up waiting: others may go on from this
            self._counts["recalls_late"] += 1
            return
        kept.recall = None
        kept.recalled_tokens += tokens
        kept.tokens = self._kv_manager.plan(query).position

    def waits_for_disk(self, request: Request) -> bool:
        """Whether the disk still reads for it; a prompt whose KV takes too long is prefilled."""
        kept = request.kept
        if kept.recall is None or not kept.recall.is_late:
            return kept.recall is not None
        self._counts["recalls_given_up"] += 1
        kept.recall, kept.recalls = None, RECALLS_MAX
        kept.tokens = self._kv_manager.plan(request.query).position
        return False

    def forget(self) -> None:
        """The cache is emptied: what is being read from disk does not come back."""
        self._epoch += 1

    # ------------------------------------------------------------ memory

    def makes_room(
        self, request: Request, running: Collection[Request], depth: int
    ) -> tuple[bool, int]:
        """Free memory for its slot; say whether there is enough, and how many bytes that takes.

        `running` are the requests that have a slot: what each of them will take is left free, so
        that many answers that begin at once do not outgrow the memory together. `depth` is the
        length of the longest prompt that is being read, this one included.
        """
        kv_manager, query, rows = self.kv_manager_of(request), request.query, rows_of(request)
        own_share = self._own_share(request, running)
        # What first forwards will allocate: states and windows; rows are there.
        promised = sum(
            self._uncached.unwritten_bytes(rows_of(other))
            for other in running
            if other.position <= other.cached_tokens
        )
        growth = sum(map(self._growth_bytes, [*running, request])) if running else 0
        cost = PromptCost(
            lambda: round((1 + own_share) * kv_manager.slot_cost(query, rows)) + promised,
            round((1 + own_share) * self._uncached.slot_cost(query, rows)) + promised,
            growth,
            lambda: 0 if running else kv_manager.copied_bytes(query),
        )
        return self._config.memory.admits(self._kv_manager, query, cost, not running, depth)

    def _own_share(self, request: Request, running: Collection[Request]) -> float:
        """Return which part of its KV a batch copies when it joins: not the trunk that it shares.

        Nothing is copied for one that runs alone.
        """
        if not running or not self._decoder.is_mergeable:
            return 0
        if not self._decoder.shares_trunks:
            return 1
        trunk = max(_shared_tokens(other, request) for other in running)
        if trunk < self._decoder.trunk_tokens_min:
            return 1
        cold_bytes = self._uncached.cold_bytes
        # Windows and states are each row's own.
        spared = cold_bytes(trunk) - self._uncached.unwritten_bytes(trunk)
        return 1 - max(0, spared) / max(1, cold_bytes(rows_of(request)))

    def _growth_bytes(self, request: Request) -> int:
        """Return what its answer is thought to take yet; a batch has no rows to spare for it."""
        told = request.prompt_tokens + request.completion_tokens
        end = min(request.prompt_tokens + request.tokens_max, told + GROWTH_ROWS)
        return self._uncached.cold_bytes(end + STEP) - self._uncached.cold_bytes(told)

    def no_room(self, request: Request, cost: int) -> Failed:
        """Refuse a prompt that does not fit though all else was given up."""
        assert request.slot is None and cost >= 0, (request.request_id, cost)
        self._counts["memory_refusals"] += 1
        text = self._config.memory.refusal(request.prompt_tokens, cost)
        log.warning("no memory request=%s %s", request.request_id, text)
        return Failed(request.request_id, 400, "context_length_exceeded", text)


def rows_of(request: Request) -> int:
    """Return for how many tokens a slot has room at first."""
    return request.prompt_tokens + min(request.tokens_max, SPARE_ROWS)


def prefills_for(leader: Request, request: Request) -> bool:
    """Whether `leader` is about to prefill what `request` would have to prefill too."""
    if not (leader.uses_cache and request.uses_cache):
        return False
    return _shared_tokens(leader, request) > max(leader.position, request.kept.tokens)


def _shared_tokens(other: Request, request: Request) -> int:
    """Return up to which of its cuts a prompt begins as another one does."""
    shared = request.kept.shared.get(other.request_id)
    if shared is None:
        theirs = set(other.query.names)
        mine = zip(request.query.cuts, request.query.names, strict=True)
        shared = max((cut for cut, name in mine if name in theirs), default=0)
        request.kept.shared[other.request_id] = shared
    return shared
