"""Has every rank do to its layers what rank 0 does to its own.

What is told has no array in it: rows are named by where they are. Each operation is local to a
rank, so that it is told before or after it is done here as suits; what it gives is told with the
number that all ranks know it by.
Owner: the inference thread.
"""

from collections.abc import Sequence
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.worker.disk.file_format import Record
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache
from hearth.worker.kv.quantise_kv import (
    KVRows,
    LayerRows,
    LayerStates,
    PackedFormat,
    QuantFormat,
)
from hearth.worker.ranks.disk.leading_disk_thread import have_taken
from hearth.worker.ranks.named_kv import NamedRun, Telling, handle_of, told_format

SAMPLE_ROWS: Final = 1 << 15  # of a live cache, by which the ranks' bytes are compared


class LeadingLayerMap(LayerMap):
    """The layer map of rank 0, whose operations the followers' do too.

    `byte_share` is how many bytes the greediest rank has for one of rank 0's.
    Owner: the inference thread.

    Raises:
        UnknownCache: no reuse is possible, with what some rank keeps.
        StartError: the ranks keep other kinds of things.
    """

    def __init__(self, probe: list[Any], telling: Telling) -> None:
        super().__init__(probe)
        self._telling = telling
        answers = telling.ask("layer_map", handle_of(probe), SAMPLE_ROWS)
        kinds = kinds_of(self)
        for rank, (unknown, theirs, _) in enumerate(answers, 1):
            if unknown:
                raise UnknownCache(f"{unknown} on rank {rank}")
            if theirs != kinds:
                raise StartError(
                    f"Rank 0 has layers that keep {_names(kinds)}, and rank {rank} ones that keep "
                    f"{_names(theirs)}: with RANK_SPLIT=pipeline each rank needs layers of each "
                    "kind. Set RANK_SPLIT=tensor, or fewer RANKS."
                )
        own = self.slot_bytes(SAMPLE_ROWS, None)
        self.byte_share = max((nbytes / own for _, _, nbytes in answers if own), default=1.0)

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        return NamedRun.of(super().rows(cache, start, end), cache, start, end)

    def kept_rows(self, kept: KVRows, tokens: int | None = None) -> tuple[LayerRows, ...]:
        end = -1 if tokens is None else tokens
        return NamedRun.of(super().kept_rows(kept, tokens), kept, 0, end)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        kept = self._telling.rows(super().copy_rows(cache, start, end, form))
        told = (handle_of(cache), start, end, told_format(form))
        self._telling.tell("copy_rows", kept.handle, *told)
        return kept

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        sources = _sources(row_runs)
        self._telling.tell("put_rows", handle_of(cache), sources, position, rows)
        super().put_rows(cache, row_runs, position, rows)

    def reserve(self, cache: list[Any], rows: int) -> int:
        room = super().reserve(cache, rows)  # which depends on the memory that is free here
        self._telling.tell("reserve", handle_of(cache), rows, room)
        return room

    def quantise(self, cache: list[Any], form: QuantFormat) -> None:
        raise AssertionError("live caches over several ranks are not packed")

    def trim(self, cache: list[Any], position: int) -> None:
        self._telling.tell("trim", handle_of(cache), position)
        super().trim(cache, position)

    # ------------------------------------------------------------ windows and states

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        kept = self._telling.rows(super().copy_window(cache, tokens, behind))
        self._telling.tell("copy_window", kept.handle, handle_of(cache), tokens, behind)
        return kept

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        self._telling.tell("put_window", handle_of(cache), _sources(row_runs), position)
        super().put_window(cache, row_runs, position)

    def take_state(self, cache: list[Any]) -> LayerStates:
        kept = self._telling.states(super().take_state(cache))
        self._telling.tell("take_state", kept.handle, handle_of(cache))
        return kept

    def put_state(self, cache: list[Any], state: LayerStates) -> None:
        self._telling.tell("put_state", handle_of(cache), handle_of(state))
        super().put_state(cache, state)

    # ------------------------------------------------------------ what was read from disk

    def rows_from(self, record: Record) -> KVRows:
        kept = self._telling.rows(super().rows_from(record))
        have_taken(self._telling, record, kept.handle)
        return kept

    def state_from(self, record: Record) -> LayerStates:
        kept = self._telling.states(super().state_from(record))
        have_taken(self._telling, record, kept.handle)
        return kept


def kinds_of(layers: LayerMap) -> list[int]:
    """Return what decides how KV is kept: whether there are rows, states, and the window."""
    layout = layers.layout
    return [int(layout.has_rows), int(layout.has_state), layout.window]


def _names(kinds: Sequence[int]) -> str:
    names = ("rows of every token", "states", "rows of a window")
    return " and ".join(name for name, kind in zip(names, kinds, strict=True) if kind) or "nothing"


def _sources(row_runs: Sequence[tuple[LayerRows, ...]]) -> list[Any]:
    """Return where these runs are; each came from this layer map."""
    found = []
    for run in row_runs:
        assert isinstance(run, NamedRun), type(run)
        found.append(run.source)
    return found
