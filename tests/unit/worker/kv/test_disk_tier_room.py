"""Reading from disk makes room, and never by what it is about to hang something from.

Nothing is taken in that does not fit the prompt, or what is there.
"""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hearth.worker.cache.block_hash import PrefixHash, prefix_hashes
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import Budget, ExtentStore, Layout
from hearth.worker.cache.prefix_search import PrefixQuery, PrefixSearch
from hearth.worker.disk.file_format import Array, FileKind, Record
from hearth.worker.kv.disk_tier import DiskTier
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.serialise_kv import rows_from, state_from
from scripts.harness.store_builders import DENSE, check_store

RUN = 4  # tokens
ROOT = PrefixHash(b"\x01" * 16)
TOKENS = np.arange(2 * RUN, dtype=np.int32)
NAMES = [ROOT, *prefix_hashes(ROOT, TOKENS, [RUN, 2 * RUN])]
PART = np.ones((1, 1, RUN, 4), np.float32)
RUN_BYTES = 2 * PART.nbytes
QUERY = PrefixQuery(TOKENS, [RUN, 2 * RUN], NAMES[1:])


def tier(
    bytes_max: int, layout: Layout = DENSE, is_exact: bool = False
) -> tuple[DiskTier, ExtentStore]:
    store = ExtentStore(ROOT, layout, Budget(bytes_max))
    layers: Any = SimpleNamespace(
        layout=layout,
        row_bytes=RUN_BYTES // RUN,
        are_rows=lambda kept, start, end: True,
        are_window_rows=lambda kept, tokens_max: True,
        is_state=lambda kept: True,
        rows_from=lambda record: rows_from(record.arrays),
        state_from=lambda record: state_from(record.arrays),
    )
    disk_thread: Any = SimpleNamespace(file_store=None)
    rules = KeepRules(slots_max=1, chunk=256, is_exact=is_exact)
    return DiskTier(store, layers, Evictor(store, 256, 0.0), rules, disk_thread), store


def record(number: int, kind: FileKind = FileKind.ROWS) -> Record:
    arrays = tuple(Array(f"0.{part}", "F32", PART) for part in range(2))
    tokens = TOKENS[number * RUN : (number + 1) * RUN]
    start, end = NAMES[number], NAMES[number + 1]
    return Record(ROOT, start, end, number * RUN, tokens, True, kind, arrays)


def take_in(disk: DiskTier, store: ExtentStore, *records: Record) -> int:
    now = time.monotonic()
    return disk.take_in(records, QUERY, store.root, LinePriority(1, now, now))


WINDOWED, LONG_WINDOWED = (Layout(has_state=False, window=size) for size in (RUN, 2 * RUN))
HYBRID = Layout(has_state=True, window=0)
FIRST, SECOND = record(0), record(1)
WINDOW, STATE = record(0, FileKind.WINDOW), record(0, FileKind.STATE)


@pytest.mark.parametrize(
    ("layout", "runs", "read", "taken", "refused"),
    [
        pytest.param(DENSE, 2, [FIRST, SECOND], 2, 0, id="two runs where there is room"),
        pytest.param(DENSE, 1.5, [FIRST, SECOND], 1, 1, id="a run and what it hangs from"),
        pytest.param(WINDOWED, 1.5, [FIRST, WINDOW], 1, 1, id="a window and its run"),
        pytest.param(HYBRID, 1.5, [FIRST, STATE], 1, 1, id="a snapshot and the run that it ends"),
        pytest.param(
            LONG_WINDOWED, 2.5, [FIRST, SECOND, WINDOW], 2, 1, id="a window and the runs behind it"
        ),
    ],
)
def test_nothing_pushes_out_what_it_hangs_from(
    layout: Layout, runs: float, read: list[Record], taken: int, refused: int
) -> None:
    disk, store = tier(int(runs * RUN_BYTES), layout)
    assert take_in(disk, store, *read) == taken * RUN
    assert disk.counts["recalls_refused"] == refused
    assert len(store) == taken
    check_store(store)


def test_rows_of_another_prompts_tokens_are_not_taken_in_under_this_ones_name() -> None:
    disk, store = tier(8 * RUN_BYTES)
    assert take_in(disk, store, replace(FIRST, tokens=FIRST.tokens + 1)) == 0
    assert disk.counts["recalls_other_tokens"] == 1 and len(store) == 0


@pytest.mark.parametrize(("part", "is_exact"), [(STATE, True), (WINDOW, False), (WINDOW, True)])
def test_what_is_fast_finds_no_place_beside_canonical_rows(part: Record, is_exact: bool) -> None:
    disk, store = tier(8 * RUN_BYTES, HYBRID if part is STATE else WINDOWED, is_exact)
    assert take_in(disk, store, FIRST, replace(part, is_canonical=False)) == RUN
    assert disk.counts["recalls_homeless"] == 1
    assert all(node.snapshot is None for node in store.nodes)


def test_a_fast_snapshot_beside_canonical_rows_is_known_as_fast() -> None:
    disk, store = tier(8 * RUN_BYTES, Layout(has_state=True, window=0))
    fast = replace(record(0, FileKind.STATE), is_canonical=False)
    assert take_in(disk, store, record(0), fast) == RUN
    assert [node.is_snapshot_fast for node in store.nodes if node.snapshot] == [True]
    for is_exact, found in ((False, (RUN, False)), (True, (0, True))):
        prefix = PrefixSearch(store, QUERY, is_exact).run()
        assert (prefix.position, prefix.is_canonical) == found
