"""Drives an extent store with random conversations, as a state machine of hypothesis."""

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.conversation_priority import LinePriorities, LinePriority
from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import Budget, Extent, ExtentStore, Layout, PrefixNode
from hearth.worker.cache.prefix_search import FoundPrefix, PrefixQuery, PrefixSearch
from scripts.harness.store_builders import (
    DENSE,
    HYBRID,
    MIXED,
    ROOT,
    ROW_BYTES,
    STATES_ONLY,
    WINDOWED,
    WINDOWS_ONLY,
    Part,
    ask,
    check_store,
    cut_out_worth,
    name_of,
    path_to,
    prefix_of,
    rows,
)

LAYOUTS = st.sampled_from([DENSE, HYBRID, WINDOWED, MIXED, STATES_ONLY, WINDOWS_ONLY])
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=8)
SLOTS = st.integers(0, 2)
PICKS = st.integers(0, 1000)
WORTHS = st.sampled_from([0.0, 0.01, 0.1, 1.0, math.inf])
TTL_S = 1000.0


class Caching(RuleBasedStateMachine):
    """Requests come and go over a small budget."""

    @initialize(
        layout=LAYOUTS,
        tokens_max=st.integers(3, 30),
        buffers_max=st.integers(4, 60),
    )
    def begin(self, layout: Layout, tokens_max: int, buffers_max: int) -> None:
        budget = Budget(tokens_max * ROW_BYTES, buffers_max)
        self.store = ExtentStore(ROOT, layout, budget)
        self.evictor = Evictor(self.store, 2, TTL_S)
        self.lines = LinePriorities()
        self.known: list[LinePriority] = []
        self.pinned: list[PrefixNode] = []
        self.asked: list[PrefixQuery] = []  # the last ones
        self.told: tuple[object, list[FoundPrefix]] = (None, [])  # a version, and what was found
        self.now = 0.0

    # ------------------------------------------------------------ what requests do

    @rule(
        tokens=PROMPTS,
        cuts=st.sets(st.integers(1, 8), max_size=4),
        canonical_to=st.integers(0, 8),
        slot=SLOTS,
    )
    def run_a_request(
        self, tokens: list[int], cuts: set[int], canonical_to: int, slot: int
    ) -> None:
        line = self.a_line()
        node, held = self.store.root, []
        ends = sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)})
        for end in ends:
            run = pack(tokens[node.position : end])
            is_canonical = end <= canonical_to
            before = node
            node.pins += 1
            node, extent = self.store.commit(node, name_of(tokens[:end]), run, is_canonical, line)
            here = extent or node.arrival
            if here is not None:
                here.holders.add(slot)
                held.append(here)
            node.pins += 1
            self.keep_layers(here, node)
            node.pins -= 1
            before.pins -= 1
        node.is_prompt_end = True
        self.store.invalidate_plans()  # as where a slot is checked in
        self.asked = [*self.asked[-2:], ask(tokens, ends)]
        self.lines.end_request(line, self.now)
        assert prefix_of(node) == tokens
        assert all(extent in self.store for extent in held)

    def a_line(self) -> LinePriority:
        if self.known and self.now % 3 == 0:
            line = self.known[int(self.now) % len(self.known)]
            self.lines.begin_request(line, self.now, 1)
        else:
            line = self.lines.open(self.now, 1)
            self.known.append(line)
        return line

    def keep_layers(self, extent: Extent | None, node: PrefixNode) -> None:
        """Keep a window and a state where there is room, as each forward does."""
        layout = self.store.layout
        if extent is None:
            return
        count = min(len(extent.tokens), layout.window)
        if count and extent.window is None and self.fits(node, rows(count)):
            self.store.set_window(extent, rows(count), node.position - count)
        if layout.has_state and not node.snapshot and self.fits(node, Part(15)):
            self.store.set_snapshot(node, Part(15))

    def fits(self, node: PrefixNode, part: Part) -> bool:
        worth = self.evictor.resume_worth(node, part.nbytes, self.now)
        return self.evictor.make_room(part.nbytes, part.buffers, worth, self.now)

    @rule(slot=SLOTS, position=st.integers(0, 8))
    def give_up_a_slot(self, slot: int, position: int) -> None:
        """Cut out what only this slot holds, as far as there is room."""
        for extent in list(self.store.extents):
            if slot not in extent.holders or extent.end.position <= position:
                continue
            part = rows(len(extent.tokens))
            worth = cut_out_worth(self.evictor, extent, part.nbytes, self.now)
            if extent.body is None and self.store.layout.has_rows:
                if self.evictor.make_room(part.nbytes, part.buffers, worth, self.now):
                    self.store.set_body(extent, part)
                else:
                    self.unpin_below(extent)
            self.store.remove_holder(extent, slot)

    @rule(pick=PICKS)
    def pin(self, pick: int) -> None:
        nodes = list(self.store.nodes)
        node = nodes[pick % len(nodes)]
        node.pins += 1
        self.pinned.append(node)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.pinned.pop().pins -= 1

    @rule(pick=PICKS)
    def take_a_slots_rows_too(self, pick: int) -> None:
        """A slot is filled from what is kept, and holds it from now on."""
        extents = list(self.store.extents)
        if extents:
            extent = extents[pick % len(extents)].end.arrival
            while extent is not None:
                extent.holders.add(pick % 3)
                extent = extent.start.arrival

    # ------------------------------------------------------------ what befalls them

    @rule(pick=PICKS)
    def make_fast(self, pick: int) -> None:
        extents = list(self.store.extents)
        if extents:
            extent = extents[pick % len(extents)]
            self.store.make_fast(extent)
            assert not extent.is_canonical and extent in self.store

    @rule(pick=PICKS)
    def remove(self, pick: int) -> None:
        extents = list(self.store.extents)
        if extents:
            extent = extents[pick % len(extents)]
            self.unpin_below(extent)
            start = extent.start
            self.store.remove(extent)
            self.store.prune(start)  # as all do that remove: what has no bytes is not kept
            assert extent not in self.store and extent.nbytes == 0

    def unpin_below(self, extent: Extent) -> None:
        """Requests stand elsewhere when what they stood on is removed under them."""
        below = [j for j in self.pinned if extent in path_to(j)]
        self.pinned = [j for j in self.pinned if j not in below]

    @rule(nbytes=st.integers(0, 400), buffers=st.integers(0, 30), worth=WORTHS)
    def make_room(self, nbytes: int, buffers: int, worth: float) -> None:
        held = [extent for extent in self.store.extents if extent.holders]
        bodies = {e: e.body for e in self.store.extents if not e.holders}
        if self.evictor.make_room(nbytes, buffers, worth, self.now):
            assert self.store.budget.missing(nbytes, buffers) == (0, 0)
        if self.store.layout.has_rows:
            assert all(extent in self.store for extent in held), "a slot still holds them"
        assert all(e.body is body for e, body in bodies.items() if e in self.store)

    @rule(seconds=st.integers(1, 700))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.lines.forget({extent.line for extent in self.store.extents})

    @rule()
    def clear(self) -> None:
        self.pinned = []
        self.store.clear()
        assert len(self.store) == 0 and list(self.store.nodes) == [self.store.root]
        assert not self.store.root.leaving and not self.store.root.arrival

    # ------------------------------------------------------------ what holds

    @invariant()
    def the_store_is_whole(self) -> None:
        check_store(self.store)
        budget = self.store.budget
        assert budget.bytes_used <= budget.bytes_max, budget
        assert budget.buffers_used <= budget.buffers_max, budget

    @invariant()
    def what_a_search_finds_is_the_same_while_the_version_is(self) -> None:
        found = [
            PrefixSearch(self.store, query, is_exact).run()
            for query in self.asked
            for is_exact in (False, True)
        ]
        version, before = self.told
        assert version is not self.store.version or found == before
        self.told = self.store.version, found

    @invariant()
    def every_joint_is_reached_from_the_root(self) -> None:
        reached, todo = {self.store.root}, [self.store.root]
        while todo:
            for extent in todo.pop().leaving:
                assert extent in self.store
                if extent.end not in reached:
                    reached.add(extent.end)
                    todo.append(extent.end)
        assert reached == set(self.store.nodes)

    @invariant()
    def every_joint_is_found_by_the_name_of_its_tokens(self) -> None:
        for node in self.store.nodes:
            if node is not self.store.root:
                tokens = prefix_of(node)
                assert node.position == len(tokens) and node.name == name_of(tokens)
                assert self.store.node(node.name) is node

    @invariant()
    def where_requests_stand_is_kept(self) -> None:
        for node in self.pinned:
            assert not node.is_dropped and self.store.node(node.name) is node

    def teardown(self) -> None:
        """When nobody stands anywhere or holds anything, all of it can go."""
        if not hasattr(self, "store"):
            return
        for node in list(self.store.nodes):
            node.pins = 0
            self.store.prune(node)
        for extent in list(self.store.extents):
            for slot in list(extent.holders):
                self.store.remove_holder(extent, slot)
        budget = self.store.budget
        assert self.evictor.make_room(budget.bytes_max, budget.buffers_max, math.inf, self.now)
        assert (budget.bytes_used, budget.buffers_used) == (0, 0)
        assert len(self.store) == 0 and list(self.store.nodes) == [self.store.root]
