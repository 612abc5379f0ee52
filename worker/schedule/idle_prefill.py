"""Prefills in idle time what a next request would have to."""

import bisect
from collections import deque
from dataclasses import dataclass
from typing import Final

from hearth.worker.cache.image_keys import ids_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.schedule.kv_manager_interface import KVManagerInterface
from hearth.worker.schedule.scheduler_config import SchedulerConfig

NEXT_PROMPTS_MAX: Final = 4  # rendered next prompts that wait for idle time


@dataclass(frozen=True, slots=True)
class _Prefill:
    """An idle prefill in progress: `slot` holds the beginning of `query`."""

    query: PrefixQuery
    slot: LiveSlot


class IdlePrefill:
    """Does the scheduler's work while no request is there. Owner: the inference thread.

    Invariant: at most one spare slot is open, that of `_running`.

    What decoding wrote is not quite what a prefill would have written; a canonical copy is made
    while the client runs its tool. A new request interrupts that after the chunk, or the image.
    """

    def __init__(
        self, engine: Engine, kv_manager: KVManagerInterface, config: SchedulerConfig
    ) -> None:
        self.tokens = 0  # that were prefilled here
        self._engine = engine
        self._kv_manager = kv_manager
        self._config = config
        self._running: _Prefill | None = None
        self._next_prompts: deque[PrefixQuery] = deque(maxlen=NEXT_PROMPTS_MAX)

    def step(self) -> bool:
        """Prefill one chunk of an answer, or of a next prompt; say whether there was any."""
        if self._running is None:
            query = self._next()
            if query is None:
                return False
            slot = None if self._config.isolation.spoils(query) else self._open(query)
            if slot is None:
                self._kv_manager.settle(query)
                return bool(self._next_prompts)
            self._running = _Prefill(query, slot)
        query, slot = self._running.query, self._running.slot
        position = slot.position
        assert position <= query.limit, (position, query.limit)
        if position < query.limit:
            number = bisect.bisect_right(query.cuts, position)
            end = query.cuts[number]
            if not self._engine.has_encoded(query.images, position, end):
                self._kv_manager.settle(
                    query
                )  # the image's file is gone with the request it came in
                self.stop()
                return True
            self._config.forwards.idle(query, number)
            self._prefill_to(self._running, end)
            self._kv_manager.commit(slot, query.tokens[:end], query.names[number])
            self._config.forwards.rest(())
            self.tokens += end - position
        if slot.position == query.limit:
            self._kv_manager.settle(query)
            self.stop()
        return True

    def add(self, query: PrefixQuery) -> None:
        """Prefill `query` when there is time: a prompt that is likely to come."""
        self._next_prompts.append(query)

    def stop(self) -> None:
        """Stop the prefill in progress; what was prefilled of it is kept."""
        if self._running is not None:
            self._kv_manager.close_spare(self._running.slot)
            self._running = None

    def forget(self) -> None:
        self._next_prompts.clear()
        self.stop()

    def _prefill_to(self, running: _Prefill, cut: int) -> None:
        """Prefill to the next cut in the forwards that a request takes: others round otherwise."""
        query, slot = running.query, running.slot
        ids, start = ids_of(query.tokens[:cut], query.images), slot.position
        assert start < cut <= query.limit, (start, cut, query.limit)
        while start < cut:
            end = self._config.forward_end(start, cut)
            self._engine.prefill(slot.cache, ids[start:end].tolist(), query.images)
            start = end

    def _next(self) -> PrefixQuery | None:
        """Return what is prefilled next: rendered next prompts first."""
        if self._next_prompts:
            return self._next_prompts.pop()  # the newest first: it is asked soonest
        return self._kv_manager.unfinished(self._config.natural_cuts)

    def _open(self, query: PrefixQuery) -> LiveSlot | None:
        """Return a spare slot for `query`; None where memory or slots do not allow one."""
        cost = self._kv_manager.uncached.slot_cost(query, query.limit)
        is_over = self._config.memory.over(cost, len(query.tokens))
        return None if is_over else self._kv_manager.open_spare(query)
