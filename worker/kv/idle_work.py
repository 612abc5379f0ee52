"""Chooses what idle time reads of live slots and of foreseen prompts, and opens slots for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hearth.worker.cache.block_hash import Tokens, prefix_hashes
from hearth.worker.cache.conversation_priority import (
    UNKNOWN,
    Conversation,
    LinePriorities,
    LinePriority,
)
from hearth.worker.cache.extent_store import ExtentStore
from hearth.worker.cache.prefix_search import PrefixQuery, PrefixSearch
from hearth.worker.cache.resume_planner import ResumePlan, choose_slot, make_plan, shared_cuts
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.live_slot import LiveSlot


@dataclass(frozen=True, slots=True)
class SlotSteps:
    """What a KVManager does for idle work."""

    plan: Callable[[PrefixQuery], ResumePlan]
    cold_bytes: Callable[[int], int]  # that an empty slot for so many tokens takes
    fill: Callable[[ResumePlan, PrefixQuery, LinePriority, int], LiveSlot]
    give_up: Callable[[Sequence[LiveSlot]], object]


class IdleWork:
    """The part of a KVManager that idle time uses. Owner: the inference thread.

    Two kinds of work. What the next request would have to read is read in the session's own slot,
    from where that request would go on: nothing is read twice, and nothing copied. A trunk that was
    read already and is fast is read again in a slot of its own, a spare: its canonical copy is for
    whoever restores it.
    """

    def __init__(
        self,
        store: ExtentStore,
        slots: dict[int, LiveSlot],
        layers: LayerMap,
        lines: LinePriorities,
        rules: Callable[[], KeepRules],
        steps: SlotSteps,
    ) -> None:
        self._store = store
        self._slots = slots
        self._layers = layers
        self._lines = lines
        self._rules = rules
        self._steps = steps

    # ------------------------------------------------------------ what there is to do

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> PrefixQuery | None:
        """Return the beginning of a live slot's tokens that is to be read, if there is any.

        `natural` gives the cuts of every prompt that begins with some tokens. Nothing is to be
        done where stored KV is not canonical anyway.
        """
        rules = self._rules()
        if rules.store_format is not None:
            return None
        for slot in sorted(self._slots.values(), key=lambda s: -s.used_at):
            if slot.is_busy or slot.is_spare or slot.is_settled:
                continue
            # Exact mode does not reuse what decoding wrote: the next request would have to read it.
            end = slot.position if rules.is_exact else slot.system_end
            if slot.canonical_to >= end:
                continue
            cuts = [cut for cut in natural(slot.tokens) if cut <= end]
            query = self._query_of(slot, cuts)
            if query.limit > PrefixSearch(self._store, query, is_exact=True).run().position:
                return query
            slot.is_settled = True
        return None

    def _query_of(self, slot: LiveSlot, cuts: list[int]) -> PrefixQuery:
        return PrefixQuery(
            slot.tokens,
            cuts,
            prefix_hashes(slot.root.name, slot.tokens, cuts),
            Conversation(slot.line.number, slot.line.family) if slot.line else UNKNOWN,
            root=slot.root.name,
            images=slot.images,
            system_end=slot.system_end,
            adapter=slot.adapter,
        )

    def known_to(self, query: PrefixQuery) -> int:
        """Return up to where a request would read nothing of what idle time is to read."""
        rules = self._rules()
        if not rules.is_exact and any(s.tokens is query.tokens for s in self._slots.values()):
            return query.limit  # it would go on behind all that the slot holds
        return min(query.limit, self._steps.plan(query).position)

    # ------------------------------------------------------------ slots for it

    def open(
        self, query: PrefixQuery, is_foreseen: bool, has_room: Callable[[int], bool]
    ) -> LiveSlot | None:
        """Check out a slot for idle work, which ends at the query's last cut.

        `has_room` says whether so many bytes may be held more. None where that is not so, where
        sessions have all slots, or where there is nothing to read.
        """
        if is_foreseen or self._rules().is_exact:
            return self._open_own(query, has_room)
        return self._open_spare(query, has_room)

    def _open_own(self, query: PrefixQuery, has_room: Callable[[int], bool]) -> LiveSlot | None:
        """Check out the slot in which the session's next request would go on."""
        is_exact, best = self._rules().is_exact, self._steps.plan(query)
        found = best.found
        if found is None or best.position >= query.limit:
            return None  # that request would read no more than what is behind its last cut
        line = found.path[-1].line if found.path else None
        own = [
            slot
            for slot in self._slots.values()
            if not slot.is_busy
            and (
                slot.is_spare
                or slot.tokens is query.tokens
                or (line is not None and slot.line is line)
            )
        ]
        plan = choose_slot(found, self._store, [s.view() for s in own], query, is_exact)
        if plan.position < best.position:
            return None  # only another session's slot holds it
        for slot in own:
            slot.is_settled |= slot.number != plan.slot  # what it holds is not what will be asked
        return self._filled(plan, query, is_exact, has_room)

    def _open_spare(self, query: PrefixQuery, has_room: Callable[[int], bool]) -> LiveSlot | None:
        """Check out a slot beside those of sessions, for what is to be canonical.

        None also where the work was done before and there was no room to keep it: nothing is
        prefilled in idle time twice either.
        """
        spares = [slot for slot in self._slots.values() if slot.is_spare]
        if self._rules().slots_max < 2:
            return None
        plan = make_plan(self._store, [s.view() for s in spares], query, is_exact=True)
        if plan.position + self._rules().chunk < self._prefilled_to(query):
            return None
        return self._filled(plan, query, True, has_room)

    def _filled(
        self,
        plan: ResumePlan,
        query: PrefixQuery,
        is_exact: bool,
        has_room: Callable[[int], bool],
    ) -> LiveSlot | None:
        """Return a busy slot with what the plan goes on from; a new one takes a spare's place."""
        spares = [slot for slot in self._slots.values() if slot.is_spare]
        if plan.slot is None and len(self._slots) - len(spares) >= self._rules().slots_max:
            return None
        if not has_room(self._cost(plan, query)):
            return None
        if plan.slot is None:
            self._steps.give_up(spares)
            plan = make_plan(self._store, [], query, is_exact)
        is_spare = plan.slot is None or self._slots[plan.slot].is_spare
        slot = self._steps.fill(plan, query, self._line_of(plan, query), query.limit)
        slot.is_spare = slot.is_settled = is_spare
        slot.canonical_cuts = shared_cuts(slot.canonical_cuts, query.cuts)
        slot.capacity = self._layers.reserve(slot.cache, query.limit)
        return slot

    def _cost(self, plan: ResumePlan, query: PrefixQuery) -> int:
        """Return how many bytes more are held once a slot is open up to the query's last cut."""
        rows = query.limit
        slot = self._slots[plan.slot] if plan.slot is not None else None
        if slot is not None and slot.capacity >= rows:
            return 0
        held = self._layers.nbytes(slot.cache) if slot is not None else 0
        return max(0, self._steps.cold_bytes(rows) - held)

    def _line_of(self, plan: ResumePlan, query: PrefixQuery) -> LinePriority:
        """Return the line that idle work is for."""
        if plan.slot is not None and (line := self._slots[plan.slot].line) is not None:
            return line
        if plan.path:
            return plan.path[-1].line
        return self._lines.open(time.monotonic(), 1, query.conversation)

    # ------------------------------------------------------------ its end

    def settle(self, query: PrefixQuery) -> None:
        """Idle work for these tokens is done, or cannot be."""
        for slot in self._slots.values():
            if slot.tokens is query.tokens:
                slot.is_settled, slot.idle_prefilled_to = True, query.limit

    def _prefilled_to(self, query: PrefixQuery) -> int:
        """Return up to where these tokens of a live slot were read canonically before."""
        for slot in self._slots.values():
            if slot.tokens is query.tokens:
                return max(slot.idle_prefilled_to, slot.canonical_to)
        return 0
