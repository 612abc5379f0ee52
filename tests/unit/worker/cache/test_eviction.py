"""Checks the KV budget, what is evicted for room or for its age, in which order, and what stays."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest

from hearth.worker.cache.conversation_priority import SPONSOR_SILENT_S, LinePriority
from hearth.worker.cache.eviction import SLACK, Evictor, find_expired, likelihood
from hearth.worker.cache.extent_store import BUFFERS_MAX, Budget, Extent, ExtentStore
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.cache.prefix_search import PrefixSearch
from scripts.harness.store_builders import (
    HYBRID,
    ROW_BYTES,
    WINDOWED,
    ask,
    check_store,
    cut_out_worth,
    every,
    keep,
    new_line,
    new_store,
    rows,
    text,
)

CHUNK = 10
TTL_S = 100.0
GRID = PrefillGrid(CHUNK)
STATE_BYTES = 100  # as `furnish` gives them
ANY = math.inf  # what is worth so much may push out everything


def evictor_of(store: ExtentStore, ttl_s: float = 0.0, chunk: int = CHUNK) -> Evictor:
    """Return the evictor of a store that is exactly full now."""
    store.budget.bytes_max = store.budget.bytes_used
    return Evictor(store, chunk, ttl_s)


def free(evictor: Evictor, nbytes: int, worth: float = ANY, now: float = 0.0) -> bool:
    """Make so many bytes free, what goes beyond the need included: exact counts are clearer."""
    slack = int(evictor.store.budget.bytes_max * SLACK)
    has_room = evictor.make_room(max(1, nbytes - slack), 0, worth, now)
    check_store(evictor.store)
    return has_room


def resumed(store: ExtentStore, tokens: list[int], cuts: Sequence[int]) -> int:
    return PrefixSearch(store, ask(tokens, cuts), False).run().position


def gone(extents: Iterable[Extent], store: ExtentStore) -> list[int]:
    return [number for number, extent in enumerate(extents) if extent not in store]


# ---------------------------------------------------------------- the budget


def test_a_budget_tells_what_is_missing_of_either_kind() -> None:
    budget = Budget(100, 10)
    assert budget.missing(100, 10) == (0, 0)
    budget.add(60, 4)
    assert budget.missing(50, 6) == (10, 0)
    assert budget.missing(40, 8) == (0, 2)
    with pytest.raises(AssertionError):
        budget.add(-61, 0)


# ---------------------------------------------------------------- make_room


def test_what_can_never_fit_pushes_nothing_out() -> None:
    store = new_store(bytes_max=rows(30).nbytes)
    keep(store, text(1, 30), [10, 20, 30])
    evictor = Evictor(store, CHUNK, 0.0)
    assert not evictor.make_room(rows(30).nbytes + 1, 2, ANY, 0.0)
    assert not evictor.make_room(1, BUFFERS_MAX + 1, ANY, 0.0)
    assert len(store) == 3 and evictor.evictions == 0


def test_nothing_worth_more_than_what_comes_goes() -> None:
    store = new_store()
    kept = keep(store, text(1, 30), [10, 20, 30])
    evictor = evictor_of(store)
    worth = evictor.leaf_worth(kept[2], kept[2].nbytes, 0.0)
    assert not free(evictor, 10, worth * 0.99)
    assert gone(kept, store) == [] and not evictor.evicted
    held = store.budget.bytes_used
    assert free(evictor, 10, worth)
    assert gone(kept, store) == [2] and evictor.evicted == {"extent": 1}
    assert evictor.evicted_bytes == {"extent": held - store.budget.bytes_used}


def test_a_little_more_goes_than_was_asked_for() -> None:
    store = new_store()
    kept = keep(store, text(1, 1000), range(1, 1001))
    evictor = evictor_of(store)
    assert evictor.make_room(ROW_BYTES, 0, ANY, 0.0)
    assert len(gone(kept, store)) == 1 + int(1000 * SLACK)
    check_store(store)


def test_buffers_are_made_room_for_as_bytes_are() -> None:
    store = new_store()
    kept = keep(store, text(1, 40), [10, 20, 30, 40])
    store.budget.buffers_max = 8
    evictor = Evictor(store, CHUNK, 0.0)
    assert evictor.make_room(1, 3, ANY, 0.0)
    assert gone(kept, store) == [2, 3]
    assert not evictor.make_room(1, 6, worth=0.0, now=0.0)
    assert gone(kept, store) == [2, 3]


# ---------------------------------------------------------------- order


def test_a_trunk_outlives_its_branches() -> None:
    store = new_store()
    old, young = new_line(1, used_at=0.0), new_line(2, used_at=500.0)
    trunk = keep(store, text(1, 20), [10, 20], old)
    twigs = [
        keep(store, text(1, 20) + text(seed, 20), [10, 20, 30, 40], young)[2:] for seed in (2, 3)
    ]
    evictor = evictor_of(store)
    for count in range(4):
        assert gone(trunk, store) == []
        assert free(evictor, rows(10 * (count + 1)).nbytes, now=500.0)
    assert gone(twigs[0] + twigs[1], store) == [0, 1, 2, 3]
    assert free(evictor, rows(50).nbytes, now=500.0)
    assert gone(trunk, store) == [1], "its end first"


def test_the_line_that_is_least_likely_needed_goes_first() -> None:
    store = new_store()
    lines = [new_line(n, used_at=used_at) for n, used_at in enumerate((900.0, 0.0, 600.0))]
    kept = [keep(store, text(n, 10), [10], line)[0] for n, line in enumerate(lines)]
    evictor = evictor_of(store)
    assert free(evictor, rows(10).nbytes, now=1000.0)
    assert gone(kept, store) == [1]
    assert free(evictor, rows(20).nbytes, now=1000.0)
    assert gone(kept, store) == [1, 2]


def test_bytes_that_a_live_slot_holds_too_go_before_all_others() -> None:
    store = new_store()
    (old,) = keep(store, text(1, 10), [10], new_line(1, used_at=-1e4))
    held = keep(store, text(2, 20), [10, 20], new_line(2))
    for extent in held:
        extent.holders.add(0)
    evictor = evictor_of(store)
    assert free(evictor, rows(20).nbytes, worth=0.0)
    assert all(extent in store and extent.body is None for extent in held)
    assert old.body is not None


def test_an_expired_line_goes_first_but_only_when_room_is_needed() -> None:
    store = new_store()
    expired, old = new_line(1, used_at=0.0, turns=2), new_line(2, used_at=50.0)
    kept = [
        *keep(store, text(1, 10), [10], old),
        *keep(store, text(2, 10), [10], expired),
    ]
    evictor = evictor_of(store, ttl_s=100.0)
    store.budget.bytes_max += rows(5).nbytes
    assert evictor.make_room(rows(5).nbytes, 0, ANY, now=110.0)
    assert gone(kept, store) == []
    assert evictor.make_room(rows(6).nbytes, 0, 0.0, now=110.0), "for whatever comes"
    assert gone(kept, store) == [1]


def test_an_extent_is_worth_what_its_likeliest_line_makes_it() -> None:
    store = new_store()
    old, young = new_line(1, used_at=0.0), new_line(2, used_at=600.0)
    (trunk,) = keep(store, text(1, 10), [10], old)
    evictor = evictor_of(store)
    alone = cut_out_worth(evictor, trunk, 100, now=600.0)
    keep(store, text(1, 30), [10, 20, 30], young)
    assert cut_out_worth(evictor, trunk, 100, now=600.0) == 2 * alone


# ---------------------------------------------------------------- snapshots and windows


def test_snapshots_thin_out_and_leave_spaced_ones() -> None:
    store = new_store(HYBRID)
    cuts = list(range(CHUNK, 65 * CHUNK, CHUNK))
    kept = keep(store, text(1, 64 * CHUNK), cuts)
    evictor = evictor_of(store)
    for left in (32, 16, 8):
        nbytes = (64 - left) * 100
        assert free(evictor, nbytes)
        places = [0, *(e.end.position for e in kept if e.end.snapshot)]
        gaps = [b - a for a, b in pairwise(places)]
        assert len(places) == 1 + left and max(gaps) <= 4 * CHUNK * 64 // left
        assert places[-1] == cuts[-1], "where the line goes on stays"
    assert gone(kept, store) == []


def test_snapshots_where_lines_part_or_turns_ended_outlive_those_amid_a_message() -> None:
    store = new_store(HYBRID)
    line = new_line()
    line.resumed_at = 80  # all messages are of older prompts
    kept = keep(store, text(1, 80), [10, 20, 25, 30, 40, 50, 60, 70, 80], line)
    keep(store, text(1, 40) + text(2, 10), [10, 20, 25, 30, 40, 50])
    branch, prompt_end, header, tip = kept[4].end, kept[6].end, kept[2].end, kept[8].end
    prompt_end.is_prompt_end = True
    evictor = evictor_of(store)
    assert free(evictor, 500)
    places = {node for node in store.nodes if node.snapshot}
    assert places >= {branch, prompt_end, header, tip}
    assert {j.position for j in places} == {25, 40, 50, 60, 80}
    assert free(evictor, 600)
    assert not header.snapshot and prompt_end.snapshot and branch.snapshot


def test_rows_that_nobody_can_go_on_from_are_worth_nothing() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 20), [10, 20])
    store.set_snapshot(kept[1].end, None)
    evictor = evictor_of(store)
    assert evictor.leaf_worth(kept[1], 100, 0.0) == 0.0
    assert free(evictor, 50, worth=0.0)
    assert gone(kept, store) == [1]


def test_a_short_last_run_is_worth_all_that_would_be_computed_without_it() -> None:
    store = new_store(HYBRID)
    kept = keep(store, text(1, 100), [50, 98, 100], new_line(1))
    for extent in kept[:2]:
        store.set_snapshot(extent.end, None)
    others = keep(store, text(2, 60), [50, 60], new_line(2))
    evictor = evictor_of(store)
    assert free(evictor, 220)
    assert others[1] not in store and kept[2] in store, "100 tokens hang on it"
    assert resumed(store, text(1, 101), [50, 98, 100]) == 100


def test_windows_far_from_where_a_line_goes_on_go_first() -> None:
    store = new_store(WINDOWED)
    tokens, cuts = text(1, 12), [2, 4, 6, 8, 10]
    kept = keep(store, tokens, cuts)
    evictor = evictor_of(store, chunk=2)
    assert free(evictor, 3 * rows(2).nbytes)
    assert [extent.window is None for extent in kept] == [True, True, True, False, False]
    assert resumed(store, tokens, cuts) == 10


def test_windows_that_a_tip_looks_back_to_stay_as_long_as_the_tips_own() -> None:
    store = new_store(WINDOWED)
    prompts = [text(1, 9), text(2, 9)]
    cuts = [2, 4, 6, 8]
    for number, tokens in enumerate(prompts):
        keep(store, tokens, cuts, new_line(number))
    evictor = evictor_of(store, chunk=2)
    assert free(evictor, 4 * rows(2).nbytes), "two of each line are behind every tip's window"
    assert [resumed(store, tokens, cuts) for tokens in prompts] == [8, 8]


# ---------------------------------------------------------------- what is remembered of it


def test_each_entry_that_made_way_is_remembered_with_what_it_gave_up() -> None:
    store = new_store(HYBRID)
    lines = [new_line(number, used_at=-1000.0 * number) for number in (1, 2)]
    for line in lines:
        keep(store, text(line.number, 30), [10, 20, 30], line)
    evictor = evictor_of(store)
    held = store.budget.bytes_used
    assert free(evictor, held - 1)
    freed = held - store.budget.bytes_used
    told = [entry.as_row() for entry in evictor.last]
    assert sorted(int(str(row["line"])) for row in told) == [1, 2]
    assert sum(entry.nbytes for entry in evictor.last) == freed == evictor.evicted_bytes.total()
    assert sum(entry.parts.total() for entry in evictor.last) == evictor.evictions
    assert sum(entry.tokens for entry in evictor.last) == 60
    assert {entry.root for entry in evictor.last} == {store.root}


# ---------------------------------------------------------------- windows of several runs

RUN = 2  # tokens of each run: half of a window


def windows(store: ExtentStore) -> int:
    return sum(extent.window is not None for extent in store.extents)


def thin_out(store: ExtentStore, left: int) -> None:
    """Have the evictor make room until so many windows are left."""
    evictor = Evictor(store, RUN, 0.0)
    while windows(store) > left:
        store.budget.bytes_max = store.budget.bytes_used
        assert evictor.make_room(1, 0, math.inf, 0.0)
        check_store(store)


def test_places_to_resume_at_thin_out_evenly() -> None:
    store = new_store(WINDOWED)
    tokens, cuts = text(1, 129), list(range(RUN, 129, RUN))
    keep(store, tokens, cuts)
    for left, most in ((48, 8), (32, 12), (16, 32)):  # two windows make a place
        thin_out(store, left)
        again = [
            end - resumed(store, [*tokens[:end], *text(2, 2)], cuts[: number + 1])
            for number, end in enumerate(cuts)
        ]
        assert max(again) <= most and again[-1] == 0, (left, again)


def test_a_window_that_lacks_another_is_worth_nothing_but_where_a_line_goes_on() -> None:
    store = new_store(WINDOWED)
    first, second, third, last = keep(store, text(1, 8), [2, 4, 6, 8])
    evictor = Evictor(store, RUN, 0.0)
    whole = evictor.window_worth(third, 20, 0.0)
    store.set_window(second, None, second.end.position)
    assert evictor.window_worth(third, 20, 0.0) >= whole, "the tip looks back to it"
    store.set_window(last, None, last.end.position)
    keep(store, text(1, 10), [10], start=last.end)
    assert evictor.window_worth(third, 20, 0.0) == 0.0
    assert evictor.window_worth(first, 20, 0.0) > 0.0, "it is the whole window at its end"


# ---------------------------------------------------------------- places to resume at


def line_of(length: int, step: int, resumed_at: int) -> tuple[ExtentStore, list[Extent]]:
    """Return a line with messages each `step` tokens, none on the grid, and where it resumed."""
    store, line = new_store(HYBRID), new_line()
    line.resumed_at = resumed_at
    return store, keep(store, text(1, length), list(range(step, length, step)), line)


def places_left(store: ExtentStore, count: int) -> set[int]:
    """Return where a snapshot is left once there is room for `count` of them."""
    evictor = Evictor(store, CHUNK, 0.0)
    kept = sum(extent.nbytes for extent in store.extents)
    store.budget.bytes_max = int((kept + count * STATE_BYTES) / (1 - SLACK)) + 1
    assert evictor.make_room(0, 0, float("inf"), 0.0)
    return {node.position for node in store.nodes if node.snapshot is not None}


def test_messages_of_the_last_prompt_outlive_those_of_older_ones() -> None:
    store, kept = line_of(140, 7, resumed_at=98)
    rates = [likelihood(extent.end, GRID) for extent in kept if extent.end.position % CHUNK]
    newest = [extent.end.position > 98 for extent in kept if extent.end.position % CHUNK]
    assert min(rate for rate, is_new in zip(rates, newest, strict=True) if is_new) > max(
        rate for rate, is_new in zip(rates, newest, strict=True) if not is_new
    )
    assert {105, 112, 119, 126, 133} <= places_left(store, 8)


def test_places_amid_system_and_tools_outlive_those_amid_a_message() -> None:
    """Sub-agents with other tools part there (captured from Claude Code, Codex and Cline)."""
    store = new_store(HYBRID)
    line = new_line()
    line.resumed_at = 100
    kept = keep(store, text(1, 100), list(range(CHUNK, 101, CHUNK)), line)
    for extent in kept[:3]:
        extent.end.is_in_head = True
    assert places_left(store, 4) == {10, 20, 30, 100}


def test_an_end_that_was_left_out_is_no_tip() -> None:
    store = new_store(HYBRID)
    former = keep(store, text(1, 40) + text(2, 5), [10, 20, 30, 40, 45])
    newest = keep(store, text(1, 40) + text(3, 6), [10, 20, 30, 40, 46])
    tip, left_out = newest[-1].end, former[-1].end
    assert likelihood(left_out, GRID) == likelihood(tip, GRID)
    left_out.is_left_out = True
    assert likelihood(left_out, GRID) < likelihood(tip, GRID)
    left_out.pins = 1  # a request stands there
    assert likelihood(left_out, GRID) == likelihood(tip, GRID)


def test_where_several_went_on_is_worth_more_than_where_one_did() -> None:
    store, kept = line_of(60, 6, resumed_at=60)
    once, often = kept[2].end, kept[3].end
    once.resumed, often.resumed = 1, 2
    assert likelihood(kept[4].end, GRID) < likelihood(once, GRID) < likelihood(often, GRID)
    assert store.budget.bytes_used > 0


# ---------------------------------------------------------------- what is too old


def kept(store: ExtentStore, seed: int, used_at: float, length: int = 24) -> list[Extent]:
    """Keep a prompt, whose first 8 tokens all prompts share, for a line used at `used_at`."""
    line = new_line(seed, used_at)
    return keep(store, text(0, 8) + text(seed, length - 8), every(8, length + 1), line)


def expired(store: ExtentStore, now: float) -> list[Extent]:
    return find_expired(store, (), now, TTL_S)[0]


def test_a_line_that_waits_for_its_sub_agents_is_as_young_as_they_are() -> None:
    store = new_store()
    waiting = kept(store, 1, 0.0)
    agent = LinePriority(2, 0.0, 90.0, sponsor=waiting[0].line)
    keep(store, text(9, 16), every(8, 17), agent)
    assert expired(store, 100.0) == []
    assert len(expired(store, 190.0)) == len(store)
    agent.is_running = True
    assert expired(store, SPONSOR_SILENT_S) == []
    waits_no_more, next_at = find_expired(store, (), SPONSOR_SILENT_S + TTL_S, TTL_S)
    assert set(waits_no_more) == set(waiting) and next_at == math.inf
