"""Checks which places to resume at stay under pressure: their order, not their figures."""

from hearth.worker.cache.eviction import SLACK, Evictor
from hearth.worker.cache.extent_store import Extent, ExtentStore
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.cache.resume_point_likelihood import likelihood
from scripts.harness.store_builders import HYBRID, keep, new_line, new_store, text

CHUNK = 10
GRID = PrefillGrid(CHUNK)
STATE_BYTES = 100  # as `furnish` gives them


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
    return {joint.position for joint in store.joints if joint.snapshot is not None}


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
