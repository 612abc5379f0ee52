"""Idle work: prefill now what a next request would have to."""

import bisect
from collections import deque
from dataclasses import dataclass
from typing import Final

from hearth.worker.cache.image_keys import ids_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.live_slots import LiveSlot
from hearth.worker.schedule.scheduler_interfaces import KVManagerInterface, SchedulerRules

FORESEEN_MAX: Final = 4  # prompts that are prefilled in idle time before they are asked


@dataclass(frozen=True, slots=True)
class _Begun:
    """Idle work in progress."""

    query: PrefixQuery
    slot: LiveSlot


class IdlePrefill:
    """What the scheduler does with nothing else to do. Owner: the inference thread.

    What decoding wrote is not quite what a prefill would have written; a canonical copy is made
    while the client runs its tool. A new request interrupts that after the chunk, or the image.
    """

    def __init__(self, engine: Engine, keeper: KVManagerInterface, rules: SchedulerRules) -> None:
        self.tokens = 0  # that were prefilled here
        self._engine = engine
        self._keeper = keeper
        self._rules = rules
        self._begun: _Begun | None = None
        self._foreseen: deque[PrefixQuery] = deque(maxlen=FORESEEN_MAX)

    def step(self) -> bool:
        """Prefill one chunk of what was generated, or is foreseen; say whether there was any."""
        if self._begun is None:
            query = self._next()
            if query is None:
                return False
            slot = self._opened(query)
            if slot is None:
                self._keeper.settle(query)
                return bool(self._foreseen)
            self._begun = _Begun(query, slot)
        query, slot = self._begun.query, self._begun.slot
        position = slot.position
        if position < query.limit:
            number = bisect.bisect_right(query.cuts, position)
            end = query.cuts[number]
            if not self._engine.has_encoded(query.images, position, end):
                self._keeper.settle(query)  # the image's file is gone with the request it came in
                self.stop()
                return True
            self._read(self._begun, end)
            self._keeper.commit(slot, query.tokens[:end], query.names[number])
            self.tokens += end - position
        if slot.position == query.limit:
            self._keeper.settle(query)
            self.stop()
        return True

    def foresee(self, query: PrefixQuery) -> None:
        """Prefill `query` when there is time: a prompt that will be asked."""
        self._foreseen.append(query)

    def stop(self) -> None:
        """Leave what is begun; what was prefilled of it is kept."""
        if self._begun is not None:
            self._keeper.close_spare(self._begun.slot)
            self._begun = None

    def forget(self) -> None:
        self._foreseen.clear()
        self.stop()

    def _read(self, begun: _Begun, cut: int) -> None:
        """Prefill to the next cut in the forwards that a request takes: others round otherwise."""
        query, slot = begun.query, begun.slot
        ids, start = ids_of(query.tokens[:cut], query.images), slot.position
        while start < cut:
            end = self._rules.forward_end(start, cut)
            self._engine.prefill(slot.cache, ids[start:end].tolist(), query.images)
            start = end

    def _next(self) -> PrefixQuery | None:
        """Return what is prefilled next: what the next prompt is known to be first."""
        if self._foreseen:
            return self._foreseen.pop()  # the newest first: it is asked soonest
        return self._keeper.unfinished(self._rules.natural_cuts)

    def _opened(self, query: PrefixQuery) -> LiveSlot | None:
        cost = self._keeper.apart.slot_cost(query, query.limit)
        return None if self._rules.memory.over(cost) else self._keeper.open_spare(query)
