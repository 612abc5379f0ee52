"""Builds extent stores from prompts, with stand-ins for arrays, for cache tests without a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hearth.worker.cache.block_hash import PrefixHash, pack, prefix_hashes, root_hash
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import Budget, Extent, ExtentStore, Layout, PrefixNode
from hearth.worker.cache.prefix_search import PrefixQuery

ROOT = root_hash(["tests"])
DENSE = Layout(has_state=False, window=0)
HYBRID = Layout(has_state=True, window=0)
WINDOW = 4  # tokens
WINDOWED = Layout(has_state=False, window=WINDOW)
MIXED = Layout(has_state=True, window=WINDOW)
STATES_ONLY = Layout(has_state=True, window=0, has_rows=False)
WINDOWS_ONLY = Layout(has_state=False, window=WINDOW, has_rows=False)
ROW_BYTES = 10  # of one token, in a body or in a window


@dataclass(frozen=True, slots=True)
class Part:
    """Stands in for arrays."""

    nbytes: int
    buffers: int = 2


def rows(count: int) -> Part:
    return Part(count * ROW_BYTES)


def new_store(layout: Layout = DENSE, bytes_max: int = 1 << 40) -> ExtentStore:
    return ExtentStore(ROOT, layout, Budget(bytes_max))


def new_line(number: int = 1, used_at: float = 0.0, turns: int = 1) -> LinePriority:
    return LinePriority(number, used_at, used_at, turns)


def ask(tokens: Sequence[int], cuts: Sequence[int], system_end: int = 0) -> PrefixQuery:
    names = prefix_hashes(ROOT, pack(tokens), cuts)
    return PrefixQuery(pack(tokens), list(cuts), names, system_end=system_end)


def name_of(tokens: Sequence[int]) -> PrefixHash:
    return prefix_hashes(ROOT, pack(tokens), [len(tokens)])[0]


def every(step: int, length: int) -> list[int]:
    """Return the cuts of a prompt of so many tokens that has no messages."""
    cuts = list(range(step, length, step))
    return cuts if cuts and cuts[-1] == length - 1 else [*cuts, length - 1]


def text(seed: int, length: int) -> list[int]:
    """Return tokens that two seeds have not in common."""
    return (np.arange(length) + seed * 100_000).tolist()


def keep(
    store: ExtentStore,
    tokens: Sequence[int],
    ends: Sequence[int],
    line: LinePriority | None = None,
    is_canonical: bool = True,
    start: PrefixNode | None = None,
) -> list[Extent]:
    """Keep `tokens` behind `start` as runs up to each of `ends`, with all that the layout asks.

    Returns the extents that arrive at those ends, those included that were there before.
    """
    line, node, packed = line or new_line(), start or store.root, pack(tokens)
    kept: list[Extent] = []
    for end, name in zip(ends, prefix_hashes(ROOT, packed, ends), strict=True):
        run = packed[node.position : end]
        node, extent = store.commit(node, name, run, is_canonical, line)
        if extent is not None:
            furnish(store, extent)
        assert node.arrival is not None
        kept.append(node.arrival)
    return kept


def furnish(store: ExtentStore, extent: Extent) -> None:
    """Give an extent all that the layout asks, without looking at the budget."""
    layout = store.layout
    if layout.has_rows:
        store.set_body(extent, rows(len(extent.tokens)))
    if layout.window:
        count = min(layout.window, len(extent.tokens))
        store.set_window(extent, rows(count), extent.end.position - count)
    if layout.has_state:
        store.set_snapshot(extent.end, Part(100))


def spelled(path: Sequence[Extent]) -> list[int]:
    """Return the tokens along a path."""
    return [token for extent in path for token in extent.tokens.tolist()]


def path_to(node: PrefixNode) -> list[Extent]:
    """Return the extents from the root to `node`."""
    extent = node.arrival
    return [*path_to(extent.start), extent] if extent is not None else []


def prefix_of(node: PrefixNode) -> list[int]:
    return spelled(path_to(node))


def cut_out_worth(evictor: Evictor, extent: Extent, nbytes: int, now: float) -> float:
    """Return what the rows of `extent` are worth to whoever goes through it."""
    return evictor.likelihoods_from(extent, now)[extent] * len(extent.tokens) / nbytes


def check_store(store: ExtentStore) -> None:
    """Assert the invariants of an extent store."""
    nbytes = buffers = 0
    for name, node in store._nodes.items():
        assert node.name == name and not node.is_dropped
        assert (node.position == 0) == (node.arrival is None), node
        assert node.pins >= 0, node
        assert node.snapshot is not None or not node.snapshot_pinned, node
        if node.snapshot is not None:
            nbytes += node.snapshot.nbytes
            buffers += node.snapshot.buffers
    for extent in store.extents:
        before, has_rows = extent.start.arrival, store.layout.has_rows
        assert extent.end.position - extent.start.position == len(extent.tokens)
        assert extent.end.arrival is extent and extent in extent.start.leaving
        assert store.node(extent.start.name) is extent.start
        assert not extent.is_canonical or before is None or before.is_canonical, extent
        assert extent.body is not None or extent.holders or not has_rows
        assert extent.window is None or extent.window_from < extent.end.position
        assert extent.window is not None or not extent.window_pinned, extent
        assert extent.body is not None or not (extent.pinned and has_rows), extent
        for part in (extent.body, extent.window):
            if part is not None:
                nbytes, buffers = nbytes + part.nbytes, buffers + part.buffers
    assert (nbytes, buffers) == (store.budget.bytes_used, store.budget.buffers_used)
