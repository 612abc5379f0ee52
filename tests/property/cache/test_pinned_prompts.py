"""Checks that a pinned prompt can be resumed from until it is unpinned, under random requests."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import initialize, invariant, rule

from hearth.shared.errors import RequestError
from hearth.worker.cache.extent_store import MB, Extent, ExtentStore, Layout
from hearth.worker.cache.pinned_prompts import Pin, Pins
from hearth.worker.cache.prefix_search import PrefixSearch
from hearth.worker.schedule.request_state import PrefillOnly
from scripts.harness.slow_properties import slow
from scripts.harness.socketless_worker import CHUNK, Machine, machine
from scripts.harness.store_builders import Part, ask, path_to, prefix_of, rows
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.extent_store_machine import LAYOUTS, PICKS, Caching
from tests.helpers.worker.kv_prompts import KINDS, follow, prompt

IDS = st.sampled_from(["a", "b", "c"])
OWNERS = ("mine", "theirs")
KEYS = st.sampled_from(OWNERS)


def assert_marked(store: ExtentStore, pins: Pins) -> None:
    """What is marked as pinned is what the pins there are hold, and no more than their part."""
    held: list[Pin] = list(pins)
    assert all(extent in store for pin in held for extent in pin.path)
    for extent in store.extents:
        assert extent.pinned == sum(extent in pin.path for pin in held)
        assert extent.window_pinned == sum(extent in pin.windows for pin in held)
    for node in store.nodes:
        assert node.snapshot_pinned == sum(node in pin.snapshots for pin in held)
    report = pins.report()
    assert report["pinned_bytes"] <= report["pinned_bytes_max"] <= store.budget.bytes_max / 2
    assert report["pinned_bytes"] <= store.budget.bytes_used <= store.budget.bytes_max


class Pinning(Caching):
    """Requests come and go over a small budget, and some of what they leave is pinned."""

    @initialize(layout=LAYOUTS, tokens_max=st.integers(6, 60), buffers_max=st.integers(8, 80))
    def begin(self, layout: Layout, tokens_max: int, buffers_max: int) -> None:
        super().begin(layout, tokens_max, buffers_max)
        self.pins = Pins(self.store)
        self.promised: dict[str, tuple[str, list[int]]] = {}  # pin id -> key, tokens

    @rule(pick=PICKS, pin_id=IDS, key=KEYS)
    def ask_for_a_pin(self, pick: int, pin_id: str, key: str) -> None:
        """As the keeper does: count what is lacking, pin what is there, copy the rest."""
        nodes = [node for node in self.store.nodes if node.arrival is not None]
        if not nodes:
            return
        path = path_to(nodes[pick % len(nodes)])
        parts = self.lacking(path)
        nbytes, buffers = sum(p.nbytes for p in parts), sum(p.buffers for p in parts)
        held, before = self.store.budget.bytes_used, [*self.pins]
        parts_of = {
            each: self.pins.used_share([p for p in before if p.api_key == each]) for each in OWNERS
        }
        try:
            self.pins.check(pin_id, key, path, nbytes, buffers)
        except RequestError as refusal:
            assert (refusal.status, self.store.budget.bytes_used) == (409, held)
            return
        given_up = {pin.api_key for pin in before if pin not in [*self.pins]}
        assert key not in given_up
        assert all(parts_of[each] > 1 / self.pins.shares(key) for each in given_up)
        left = {row["id"] for row in self.pins.report()["pins"]}
        self.promised = {name: row for name, row in self.promised.items() if name in left}
        if not all(extent in self.store for extent in path):
            return  # it was another key's alone: a server's keys have roots of their own
        self.pins.add(pin_id, key, path)
        if self.evictor.make_room(nbytes, buffers, math.inf, self.now):
            self.complete(path)
            self.pins.add(pin_id, key, path)
            self.promised[pin_id] = key, prefix_of(path[-1].end)
        else:
            self.pins.drop(pin_id)
            self.promised.pop(pin_id, None)

    def lacking(self, path: Sequence[Extent]) -> list[Part]:
        layout, end = self.store.layout, path[-1].end
        parts = [rows(len(e.tokens)) for e in path if e.body is None and layout.has_rows]
        parts += [rows(extent.end.position - start) for extent, start in self.uncovered(path)]
        return parts + [Part(15)] * (layout.has_state and end.snapshot is None)

    def uncovered(self, path: Sequence[Extent]) -> list[tuple[Extent, int]]:
        window = self.store.layout.window
        back_to = path[-1].end.position - window
        near = [e for e in path if window and e.end.position > back_to]
        lacking = [e for e in near if not e.window_covers(back_to)]
        return [(e, max(e.start.position, back_to)) for e in lacking]

    def complete(self, path: Sequence[Extent]) -> None:
        layout, end = self.store.layout, path[-1].end
        for extent in path if layout.has_rows else ():
            if extent.body is None:
                self.store.set_body(extent, rows(len(extent.tokens)))
        for extent, start in self.uncovered(path):
            self.store.set_window(extent, rows(extent.end.position - start), start)
        if layout.has_state and end.snapshot is None:
            self.store.set_snapshot(end, Part(15))

    @rule(pin_id=IDS, key=st.sampled_from(["", "mine", "theirs"]))
    def give_up_a_pin(self, pin_id: str, key: str) -> None:
        owner, _ = self.promised.get(pin_id, (None, []))
        is_allowed = owner is not None and key in ("", owner)
        assert self.pins.drop(pin_id, key) == is_allowed
        if is_allowed:
            del self.promised[pin_id]

    @rule(pick=PICKS)
    def remove(self, pick: int) -> None:
        """A run that nothing pinned goes through is lost, and all behind it."""
        extents = [extent for extent in self.store.extents if not extent.pinned]
        if extents:
            extent = extents[pick % len(extents)]
            self.unpin_below(extent)
            self.store.remove(extent)

    @rule()
    def clear(self) -> None:
        self.promised.clear()
        self.pins.clear()
        super().clear()

    @invariant()
    def what_is_pinned_is_resumed_at_its_end(self) -> None:
        for _, tokens in self.promised.values():
            found = PrefixSearch(self.store, ask([*tokens, 9], [len(tokens)]), is_exact=False).run()
            assert found.position == len(tokens)

    @invariant()
    def pins_hold_what_they_say_and_no_more(self) -> None:
        assert_marked(self.store, self.pins)
        assert len(list(self.pins)) == len(self.promised)
        told = {row["id"]: row["tokens"] for row in self.pins.report()["pins"]}
        assert told == {pin_id: len(tokens) for pin_id, (_, tokens) in self.promised.items()}

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.pins.clear()
            assert_marked(self.store, self.pins)
        super().teardown()


Pinning.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestPinning = Pinning.TestCase


# ---------------------------------------------------------------- on real models

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "pin", "pin", "again", "unpin", "idle", "press", "clear"]),
        st.integers(0, 4),
    ),
    min_size=5,
    max_size=10,
)


class Bench:
    """A worker whose cache holds some five prompts, and what it was asked to pin there."""

    def __init__(self, name: str) -> None:
        self.name = name
        trial = machine(name, tiny=True)
        trial.ask(self.prompt(0), prefill_only=PrefillOnly(""))
        budget_mb = 5 * trial.keeper.pins.report()["pinned_bytes"] / MB
        self.warm: Machine = machine(name, tiny=True, slots_max=2, budget_mb=budget_mb)
        self.pinned: dict[int, str] = {}  # number of a prompt -> id of its pin

    def prompt(self, number: int) -> list[int]:
        return prompt(self.name, 40, 80, seed=1 + number % 5)

    def ask(self, number: int) -> None:
        """Ask, and go on with what was answered."""
        ids = self.prompt(number)
        answer = self.warm.ask(ids, 3)
        self.warm.ask(follow(self.name, ids, answer.tokens, 20), 2)

    def pin(self, number: int) -> None:
        answer = self.warm.submit(self.prompt(number), prefill_only=PrefillOnly(""))
        self.warm.run()
        if answer.reason == "prefilled":
            if (old := self.pinned.pop(number, None)) is not None:
                assert self.warm.keeper.unpin(old, "")
            self.pinned[number] = answer.request.request_id

    def again(self, number: int) -> None:
        ids = self.prompt(number)
        limit = self.warm.rule.cuts(ids)[-1]
        answer = self.warm.ask(ids, 2)
        assert answer.cached == limit or number not in self.pinned

    def unpin(self, number: int) -> None:
        pin_id = self.pinned.pop(number, "nobody's")
        assert self.warm.keeper.unpin(pin_id, "") == (pin_id != "nobody's")

    def idle(self, number: int) -> None:
        self.warm.work_ahead(number)

    def press(self, number: int) -> None:
        """Have so much asked that it fills what is left."""
        for seed in range(10 * number, 10 * number + 4):
            self.warm.ask(prompt(self.name, 3 * CHUNK, seed=1000 + seed), 1)

    def clear(self, number: int) -> None:
        if number == 0:
            self.pinned.clear()
            self.warm.scheduler.forget()

    def check(self) -> None:
        keeper = self.warm.keeper
        self.warm.check()
        assert_marked(keeper.store, keeper.pins)
        assert {row["id"] for row in keeper.pins.report()["pins"]} == set(self.pinned.values())


@pytest.mark.parametrize("name", KINDS)
@slow(8)
@given(operations=OPERATIONS)
def test_pinned_prompts_are_there_whatever_else_is_asked(
    name: str, operations: list[tuple[str, int]]
) -> None:
    bench = Bench(name)
    for what, number in operations:
        getattr(bench, what)(number)
        bench.check()
    for slot in bench.warm.keeper.slots:
        bench.warm.keeper.release_slot(slot)
    bench.warm.keeper.transfer.evictor.make_room(
        bench.warm.keeper.store.budget.bytes_max, 0, math.inf, math.inf
    )
    bench.check()
    for number in bench.pinned:
        bench.again(number)
        answer = bench.warm.ask(bench.prompt(number))
        cold = machine(name, keeps=False, tiny=True).ask(bench.prompt(number))
        same_tokens(answer, cold)
        assert np.allclose(answer.logits[0], cold.logits[0], atol=1e-4)
