"""Drives a KVManager with random prompts over layers of zeros: no model runs.

A forward writes rows, a window's rows or a state, all of them zeros.
"""

import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from hearth.shared.errors import RequestError
from hearth.worker.cache.block_hash import PrefixHash, Tokens, pack, prefix_hashes
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.extent_store import Budget
from hearth.worker.cache.prefix_search import PrefixQuery, ResumePlan, make_plan
from hearth.worker.kv.idle_work import IdleExpiry
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import KeepRules, LiveSlot
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.memory_release import Reason, Spared
from hearth.worker.kv.quantise_kv import QuantFormat
from scripts.harness.store_builders import ROOT, check_store

CHUNK, WINDOW, WIDTH = 4, 6, 32
TTL_S = 1000.0
WAITING_MAX = 4
AMPLE = 1_000  # tokens: a budget in which all is kept
PACKED = QuantFormat(8, WIDTH)
LAYERS = ("rows", "rows and a window", "rows and a state", "packed in the store", "packed in slots")

# What happens: the names of Managing's methods.
EVENTS = (
    *("come", "begin", "read") * 2,
    *("go_on",) * 4,
    *("answer",) * 4,
    *("break_off", "free_memory", "give_up", "share_out", "idle_work", "age", "clear"),
    *("pin", "unpin"),
)


def new_cache(kind: str) -> list[Any]:
    more = {"rows and a window": [RotatingKVCache(WINDOW)], "rows and a state": [ArraysCache(1)]}
    return [KVCache(), *more.get(kind, [])]


def feed(cache: list[Any], count: int) -> None:
    """Write `count` tokens, as a forward does."""
    for layer in cache:
        if isinstance(layer, ArraysCache):
            layer.cache = [mx.zeros((1, 1, WIDTH))]
        elif count:
            layer.update_and_fetch(mx.zeros((1, 1, count, WIDTH)), mx.zeros((1, 1, count, WIDTH)))


def cuts_of(tokens: Tokens) -> list[int]:
    """Return the cuts of a prompt: each chunk, and the last token but one."""
    last = len(tokens) - 1
    return sorted({*range(CHUNK, last, CHUNK), last}) if last > 0 else []


def query_of(tokens: Tokens, conversation: Conversation) -> PrefixQuery:
    cuts = cuts_of(tokens)
    names = prefix_hashes(ROOT, tokens, cuts)
    return PrefixQuery(tokens, cuts, names, conversation, system_end=cuts[0] if cuts else 0)


@dataclass(eq=False)
class Running:
    """A request that has a slot."""

    query: PrefixQuery
    slot: LiveSlot


class Managing:
    """Prompts wait, begin, are read, answered and broken off; memory is freed amid all of it."""

    def __init__(self, kind: str, slots_max: int, tokens_max: int, *, is_exact: bool) -> None:
        probe = new_cache(kind)
        feed(probe, 3)
        layers = LayerMap(probe)
        self.rules = KeepRules(
            slots_max,
            CHUNK,
            is_exact,
            ttl_s=TTL_S,
            store_format=PACKED if kind == "packed in the store" and not is_exact else None,
            store_from=8,
            running_format=PACKED if kind == "packed in slots" else None,
            running_from=10,
        )
        budget = Budget(tokens_max * layers.row_bytes)
        self.keeper = KVManager(ROOT, layers, lambda: new_cache(kind), budget, self.rules)
        self.waiting: list[PrefixQuery] = []
        self.running: list[Running] = []
        self.past: list[Tokens] = []

    def play(self, events: list[tuple[str, int]]) -> None:
        for what, seed in events:
            getattr(self, what)(random.Random(seed))
            self.check()

    # ------------------------------------------------------------ requests

    def come(self, chance: random.Random) -> None:
        words = [chance.choice([1, 2])] * chance.choice([3, 7]) + [5] * chance.randrange(1, 12)
        self._wait([9, *words, 8], chance.randrange(1, 4))

    def go_on(self, chance: random.Random) -> None:
        """Something goes on from what was read, or leaves out its last tokens."""
        if self.past:
            before = chance.choice(self.past[-4:]).tolist()
            before = before[: max(1, len(before) - chance.choice([0, 0, 1, 6]))]
            self._wait([*before, *[3] * chance.randrange(1, 9), 8], chance.randrange(1, 4))

    def _wait(self, tokens: list[int], number: int) -> None:
        if len(self.waiting) < WAITING_MAX:
            self.waiting.append(query_of(pack(tokens), Conversation(number)))
            self.keeper.plan(self.waiting[-1])

    def begin(self, chance: random.Random) -> None:
        if not self.waiting or len(self.running) == self.rules.slots_max:
            return
        query = self.waiting.pop(chance.randrange(len(self.waiting)))
        slot, plan = self.keeper.open(query, len(query.tokens))
        assert all(slot is not other.slot for other in self.running), "two requests in one slot"
        assert all(slot.line is not other.slot.line for other in self.running), "or on one line"
        assert slot.tokens.tolist() == query.tokens[: plan.position].tolist()
        self.running.append(Running(query, slot))

    def read(self, chance: random.Random) -> None:
        if self.running:
            self._read(chance.choice(self.running), is_fast=chance.random() < 0.3)

    def _read(self, one: Running, *, is_fast: bool = False) -> None:
        query, slot = one.query, one.slot
        rows = zip(query.cuts, query.names, strict=True)
        end, name = next((row for row in rows if row[0] > slot.position), (0, b""))
        if end:
            feed(slot.cache, end - slot.position)
            self.keeper.commit(slot, query.tokens[:end], PrefixHash(name), is_fast=is_fast)

    def answer(self, chance: random.Random) -> None:
        """One is read to its end, and answered."""
        if not self.running:
            self.begin(chance)
        if not self.running:
            return
        one = self.running.pop(chance.randrange(len(self.running)))
        while one.slot.position < one.query.limit:
            self._read(one)
        tokens = pack([*one.query.tokens.tolist(), *[4] * chance.randrange(6)])
        self.keeper.grow(one.slot, len(tokens))
        feed(one.slot.cache, len(tokens) - one.slot.position)
        self.keeper.close(one.slot, one.slot.cache, tokens, is_prefilled=True)
        self.past.append(tokens)

    def break_off(self, chance: random.Random) -> None:
        if self.running:
            one = self.running.pop(chance.randrange(len(self.running)))
            self.keeper.close(one.slot, one.slot.cache, one.slot.tokens, is_prefilled=False)

    def pin(self, chance: random.Random) -> None:
        """One that is read to its end is pinned, where there is room for it."""
        if not self.running:
            return
        one = chance.choice(self.running)
        while one.slot.position < one.query.limit:
            self._read(one)
        with contextlib.suppress(RequestError):
            self.keeper.pin(one.slot, str(chance.randrange(3)), "")

    def unpin(self, chance: random.Random) -> None:
        self.keeper.unpin(str(chance.randrange(3)), "")

    # ------------------------------------------------------------ what befalls them

    def free_memory(self, chance: random.Random) -> None:
        """Memory is needed for a prompt that waits, or for anybody.

        The prompt loses nothing by it, where there is room for what it goes on from.
        """
        keeper, query = self.keeper, chance.choice([*self.waiting, None])
        before = keeper.plan(query).position if query is not None else 0
        spared = Spared.of(keeper.plan(query), WINDOW) if query is not None else Spared()
        there, store, held = keeper.releasable(query), keeper.store, self._held()
        asked = int(there * chance.choice([0.2, 0.5, 1.0]))
        freed = keeper.memory.free(Reason.MEMORY, asked, spared=spared)
        assert freed == held - self._held(), "what is told is what went"
        is_ample = store.budget.bytes_max >= AMPLE * keeper.row_bytes(None)
        if query is not None:
            assert keeper.plan(query).position >= before or not is_ample, "it is spared"
        is_raw = self.rules.store_format is None and self.rules.running_format is None
        if is_ample and (query is None or is_raw):  # packed, copies take other bytes than is said
            assert freed >= asked, "as much as was said may go went"

    def _held(self) -> int:
        slots = sum(map(self.keeper.slot_bytes, self.keeper.slots))
        return self.keeper.store.budget.bytes_used + slots

    def give_up(self, chance: random.Random) -> None:
        idle = [slot for slot in self.keeper.slots if not slot.is_busy]
        if idle:
            self.keeper.release_slot(chance.choice(idle))

    def share_out(self, chance: random.Random) -> None:
        kept = chance.choice([12, 60, AMPLE]) * self.keeper.row_bytes(None)
        self.keeper.share_out(kept, chance.choice([0, 1 << 40]))

    def idle_work(self, chance: random.Random) -> None:
        query = self.keeper.idle_work.unfinished(cuts_of) if not self.running else None
        if query is None:
            return
        slot = self.keeper.idle_work.open(query, False, lambda _: True)
        if slot is None:
            self.keeper.idle_work.finish(query)
            return
        while slot.position < query.limit:
            self._read(Running(query, slot))
        self.keeper.idle_work.finish(query)
        self.keeper.close_spare(slot)

    def age(self, chance: random.Random) -> None:
        """Time passes for some of what is held, and what is too old goes."""
        gone_s = chance.choice([TTL_S / 2, 2 * TTL_S])
        for slot in self.keeper.slots:
            slot.used_at -= gone_s * chance.randrange(2)
        for line in self.keeper.lines.all:
            aged_s = gone_s * chance.randrange(2)
            line.used_at, line.ended_at = line.used_at - aged_s, line.ended_at - aged_s
        expiry = IdleExpiry(self.keeper, time.monotonic)
        while expiry.step():
            pass

    def clear(self, chance: random.Random) -> None:
        if chance.random() < 0.3:
            self.keeper.clear()

    # ------------------------------------------------------------ what holds

    def check(self) -> None:
        """Assert that each plan is what a search would find now, and that the books are right."""
        store, slots = self.keeper.store, self.keeper.slots
        idle = [slot.view() for slot in slots if not slot.is_busy]
        for query in self.waiting:
            afresh = make_plan(store, idle, query, self.rules.is_exact)
            assert _told(self.keeper.plan(query)) == _told(afresh)
        check_store(store)
        held = {(extent, slot.number) for slot in slots for extent in slot.held_extents}
        assert all((e, number) in held for e in store.extents for number in e.holders)
        pinned = Counter(extent for pin in self.keeper.pins for extent in pin.path)
        assert all(extent.pinned == pinned[extent] for extent in store.extents)
        assert all(extent in store for extent in pinned), "a pin stays whatever makes way"
        assert len(slots) <= self.rules.slots_max


def _told(plan: ResumePlan) -> ResumePlan:
    """Return a plan without when it was made."""
    assert plan.found is not None
    return replace(plan, found=replace(plan.found, version=None))
