"""Checks the extent store: shared runs, replacement, removal, and its counts of bytes."""

import subprocess
import sys
from pathlib import Path

import pytest

from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.extent_store import ExtentStore
from scripts.harness.store_builders import (
    DENSE,
    HYBRID,
    check_store,
    every,
    keep,
    name_of,
    new_line,
    new_store,
    prefix_of,
    rows,
    text,
)

PROJECT_DIR = Path(__file__).parents[4]


@pytest.mark.process
def test_the_core_imports_without_mlx() -> None:
    modules = [
        f"hearth.worker.cache.{path.stem}" for path in (PROJECT_DIR / "worker/cache").glob("*.py")
    ]
    assert "hearth.worker.cache.prefix_search" in modules
    code = f"import sys, {', '.join(modules)}\nprint([m for m in sys.modules if 'mlx' in m])"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_branches_share_the_run_before_they_part() -> None:
    store = new_store()
    one = keep(store, [1, 2, 3, 4], [2, 4])
    other = keep(store, [1, 2, 5, 6], [2, 4])
    assert one[0] is other[0] and one[1] is not other[1]
    assert len(store) == 3 and store.budget.bytes_used == rows(6).nbytes
    assert [prefix_of(e.end) for e in (one[1], other[1])] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    check_store(store)


def test_a_canonical_run_takes_the_place_of_a_fast_one_and_fast_never_replaces() -> None:
    store = new_store(HYBRID)
    (fast,) = keep(store, [1, 2], [2], is_canonical=False)
    (later,) = keep(store, [1, 2, 3], [3], is_canonical=False, start=fast.end)
    state = fast.end.snapshot
    (canonical,) = keep(store, [1, 2], [2])
    assert canonical.is_canonical and canonical.end is fast.end
    assert fast not in store and later in store, "what hangs from the node stays"
    assert canonical.end.snapshot is not None and canonical.end.snapshot is not state
    (again,) = keep(store, [1, 2], [2], is_canonical=False)
    assert again is canonical
    check_store(store)


def test_a_run_made_fast_makes_fast_what_follows_it() -> None:
    store = new_store(HYBRID)
    trunk, middle, tip = keep(store, [1, 2, 3, 4, 5, 6], [2, 4, 6])
    store.make_fast(middle)
    assert [extent.is_canonical for extent in (trunk, middle, tip)] == [True, False, False]
    assert tip.end.snapshot is not None, "it can be resumed, as fast as its rows"
    check_store(store)


def test_a_line_of_any_length_can_be_made_fast() -> None:
    store = new_store()
    kept = keep(store, text(1, 2000), every(1, 2000))
    store.make_fast(kept[0])
    assert not any(extent.is_canonical for extent in kept)
    check_store(store)


def test_what_is_removed_takes_along_what_hangs_from_it_and_no_more() -> None:
    store = new_store(HYBRID)
    trunk, stem, _ = keep(store, [1, 2, 3, 4], [2, 3, 4])
    keep(store, [1, 2, 3, 5], [2, 3, 4])
    (sibling,) = keep(store, [1, 2, 7], [3], start=trunk.end)
    store.remove(stem)
    assert set(store.extents) == {trunk, sibling}
    assert {node.position for node in store.nodes} == {0, 2, 3}
    assert stem.end.is_dropped and not sibling.end.is_dropped
    store.remove(stem)
    assert len(store) == 2, "a second time changes nothing"
    check_store(store)


def test_a_run_that_only_a_slot_holds_goes_with_the_slot() -> None:
    store = new_store()
    node, trunk = store.commit(store.root, name_of([1, 2]), pack([1, 2]), True, new_line())
    assert trunk is not None
    trunk.holders |= {0, 1}
    (child,) = keep(store, [1, 2, 3], [3], start=node)
    store.remove_holder(trunk, 0)
    assert trunk in store and child in store
    store.remove_holder(trunk, 1)
    assert len(store) == 0 and node.is_dropped and store.budget.bytes_used == 0
    check_store(store)


def broken_stores() -> list[ExtentStore]:
    """Return stores each of which breaks one invariant."""
    stores = [new_store(DENSE) for _ in range(6)]
    kept = [keep(store, [1, 2, 3, 4], [2, 4]) for store in stores]
    kept[0][0].body = None
    stores[1].budget.bytes_used += 1
    stores[2].budget.buffers_used -= 1
    kept[3][0].end.arrival = None
    kept[4][0].end.is_dropped = True
    kept[5][0].is_canonical = False
    return stores


@pytest.mark.parametrize("number", range(6))
def test_the_check_sees_what_is_broken(number: int) -> None:
    with pytest.raises(AssertionError):
        check_store(broken_stores()[number])
