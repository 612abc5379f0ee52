"""Runs the disks of ranks 1 and up, each in a thread, for a leading disk thread in memory."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import Record
from hearth.worker.disk.file_names import FileKind
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates
from hearth.worker.kv.serialise_kv import arrays_of_rows, arrays_of_state, rows_from, state_from
from hearth.worker.ranks.disk.followed_disk import FollowedDisk
from hearth.worker.ranks.disk.leading_disk_thread import LeadingDiskThread, lead_disk
from hearth.worker.ranks.followed_kv import FollowedKV
from hearth.worker.ranks.named_kv import NamedRows, NamedStates, Telling
from hearth.worker.ranks.rank_link import RankLost
from scripts.harness.ranks.ranks_in_memory import FollowerInMemory, ranks_in_memory
from tests.helpers.records.disk_records import ROOT, record

BYTES_MAX = 100 << 20
MakeStore = Callable[[Path, PrefixHash, int], FileStore]


class KVWithoutModel(FollowedKV):
    """What a follower keeps by numbers; shapes are not looked at unless `are_rows` says so."""

    are_rows: Callable[[KVRows, int], bool] = staticmethod(lambda kept, tokens: True)

    @property
    def layers(self) -> Any:
        return SimpleNamespace(
            are_rows=self.are_rows,
            rows_from=lambda record: rows_from(record.arrays),
            state_from=lambda record: state_from(record.arrays),
        )


class DiskOfRank:
    """What one follower has; its thread does what is told until the link ends."""

    def __init__(self, link: FollowerInMemory, directory: Path, make_store: MakeStore) -> None:
        self.link = link
        self.kv = KVWithoutModel()
        self.refusal: Exception | None = None
        self.disk = FollowedDisk(link, self.kv, self._open)
        self._directory, self._make_store = directory, make_store
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def file_store(self) -> FileStore:
        return self.disk.thread.file_store

    def _open(self, root: PrefixHash, label: str, hosts: object) -> FileStore:
        if self.refusal is not None:
            raise self.refusal
        return self._make_store(self._directory, root, self.link.rank)

    def _run(self) -> None:
        while True:
            try:
                operation = self.link.next()
            except RankLost:
                return
            self.kv.drop(operation.drops)
            operations = self.disk.operations | self._of_tests
            answer = operations[operation.name](*operation.arguments)
            if operation.is_asked:
                self.link.answer(answer)

    @property
    def _of_tests(self) -> dict[str, Callable[..., Any]]:
        return {
            "have_rows": self._have_rows,
            "have_states": self._have_states,
            "nothing": lambda: None,
        }

    def _have_rows(self, handle: Any, seed: int) -> None:
        self.kv.rows[handle] = rows_of(self.link.rank, seed)

    def _have_states(self, handle: Any, seed: int) -> None:
        self.kv.states[handle] = states_of(self.link.rank, seed)


class DisksOfRanks:
    """A leading disk thread over `size` ranks, whose files lie in `directory` / the rank."""

    def __init__(self, directory: Path, size: int, make_store: MakeStore) -> None:
        self.link, links = ranks_in_memory(size)
        self.telling = Telling(self.link)
        self._directory, self._open_store = directory, make_store
        self.followers = [
            DiskOfRank(link, directory / str(rank), make_store) for rank, link in links.items()
        ]

    def open(self, queue_bytes: int = BYTES_MAX) -> LeadingDiskThread:
        own = self._open_store(self._directory / "0", ROOT, 0)
        self.leading = lead_disk(self.telling, own, queue_bytes)
        return self.leading

    def rows(self, seed: int) -> NamedRows:
        """Return rank 0's part of rows; every rank has its own by the same number."""
        rows = self.telling.rows(rows_of(0, seed))
        self.telling.tell("have_rows", rows.handle, seed)
        return rows

    def states(self, seed: int) -> NamedStates:
        states = self.telling.states(states_of(0, seed))
        self.telling.tell("have_states", states.handle, seed)
        return states

    def record(self, seed: int, before: Record | None = None) -> Record:
        rows = self.rows(seed)
        arrays = arrays_of_rows(rows.layers)
        return record(seed, before=before, arrays=arrays, source=rows)

    def snapshot(self, seed: int) -> Record:
        states = self.states(seed)
        arrays = arrays_of_state(states)
        return record(seed, kind=FileKind.STATE, arrays=arrays, source=states)

    def settle(self) -> None:
        """Wait until every follower has done what it was told."""
        self.telling.ask("nothing")

    def flush(self, seconds: float) -> bool:
        """Wait until every rank has written what it was told; say whether all have."""
        is_written = self.leading.flush(seconds)
        self.settle()
        return is_written and all(each.disk.thread.flush(seconds) for each in self.followers)

    def close(self) -> None:
        self.settle()
        self.leading.close()
        for follower in self.followers:
            follower.disk.close()
            follower.link.end()
            follower.thread.join(10)


def rows_of(rank: int, seed: int) -> KVRows:
    """Return one layer's rows of 8 tokens, other ones on each rank."""
    bits = np.random.default_rng([rank, seed]).standard_normal((1, 1, 8, 4))
    array = mx.array(bits.astype(np.float32))
    mx.eval(array)
    return KVRows((LayerRows((array, array)),))


def states_of(rank: int, seed: int) -> LayerStates:
    bits = np.random.default_rng([rank, seed, 1]).standard_normal((1, 4, 4))
    array = mx.array(bits.astype(np.float32))
    mx.eval(array)
    return LayerStates(((array,),))
