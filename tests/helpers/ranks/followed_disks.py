"""Runs the disks of all ranks, those from 1 on each in a thread, over files that may stall."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import Records
from hearth.worker.disk.file_format import FileKind, FileName, Record
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates
from hearth.worker.kv.serialise_kv import arrays_of, rows_from, state_from
from hearth.worker.ranks.followed_kv import FollowedDisk, FollowedKV
from hearth.worker.ranks.leading_kv import FollowerCommands, LeadingDiskThread, lead_disk
from hearth.worker.ranks.rank_link import RankLost
from scripts.harness.ranks.ranks_in_memory import FollowerInMemory, ranks_in_memory
from tests.helpers.records.disk_records import ROOT, record

BYTES_MAX = 100 << 20
WAIT_S = 30.0


class GatedStore(FileStore):
    """Files whose writing and reading wait while `gate` is closed; `refuses` writes nothing."""

    def __init__(self, directory: Path, root: PrefixHash, bytes_max: int) -> None:
        super().__init__(directory, root, bytes_max, 0)
        self.home = directory / root.hex()
        self.gate = threading.Event()
        self.gate.set()
        self.refuses = False

    def put(self, record: Record, is_needed: bool = False) -> bool:
        assert self.gate.wait(WAIT_S)
        return not self.refuses and super().put(record, is_needed)

    def get(self, name: FileName) -> Record | None:
        assert self.gate.wait(WAIT_S)
        return super().get(name)


class KVWithoutModel(FollowedKV):
    """What a follower keeps by numbers; shapes are not looked at unless `are_rows` says so."""

    are_rows: Callable[[KVRows, int, int], bool] = staticmethod(lambda kept, start, end: True)

    @property
    def layers(self) -> Any:
        return SimpleNamespace(
            are_rows=self.are_rows,
            rows_from=lambda record: rows_from(record.arrays),
            state_from=lambda record: state_from(record.arrays),
        )


class DiskOfRank:
    """What one follower has; its thread does what is told until the link ends."""

    def __init__(self, link: FollowerInMemory, disks: "DisksOfRanks") -> None:
        self.link, self.kv = link, KVWithoutModel()
        self.disk = FollowedDisk(link, self.kv, lambda root, *_: disks.store(link.rank, root))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def have(self, handle: Any, seed: int, is_state: bool) -> None:
        if is_state:
            self.kv.states[handle] = states_of(self.link.rank, seed)
        else:
            self.kv.rows[handle] = rows_of(self.link.rank, seed)

    def _run(self) -> None:
        operations = self.disk.operations | {"have": self.have, "nothing": lambda: None}
        while True:
            try:
                operation = self.link.next()
            except RankLost:
                return
            self.kv.drop(operation.drops)
            answer = operations[operation.name](*operation.arguments)
            if operation.is_asked:
                self.link.answer(answer)


class DisksOfRanks:
    """A leading disk thread over `size` ranks, whose files lie in `directory` / the rank.

    `caps` are the bytes that a rank's files may take. An error in `refusals` is what a rank says
    in place of opening them.
    """

    def __init__(self, directory: Path, size: int, caps: Mapping[int, int] | None = None) -> None:
        self._directory, self._caps = directory, caps or {}
        self.refusals: dict[int, Exception] = {}
        self.stores: dict[int, GatedStore] = {}
        self.link, links = ranks_in_memory(size)
        self.commands = FollowerCommands(self.link)
        self.followers = [DiskOfRank(link, self) for link in links.values()]

    def store(self, rank: int, root: PrefixHash) -> GatedStore:
        if rank in self.refusals:
            raise self.refusals[rank]
        cap = self._caps.get(rank, BYTES_MAX)
        self.stores[rank] = GatedStore(self._directory / str(rank), root, cap)
        return self.stores[rank]

    def open(self, queue_bytes: int = BYTES_MAX) -> LeadingDiskThread:
        self.leading = lead_disk(self.commands, self.store(0, ROOT), queue_bytes)
        return self.leading

    def record(self, seed: int, before: Record | None = None) -> Record:
        """Return rank 0's part of rows; every rank has its own by the same number."""
        rows = self.commands.rows(rows_of(0, seed))
        self.commands.send("have", rows.handle, seed, False)
        return record(seed, before=before, arrays=arrays_of(rows), source=rows)

    def snapshot(self, seed: int) -> Record:
        states = self.commands.states(states_of(0, seed))
        self.commands.send("have", states.handle, seed, True)
        return record(seed, kind=FileKind.STATE, arrays=arrays_of(states), source=states)

    def write(self, *records: Record) -> None:
        assert all([self.leading.write(record) for record in records])
        assert self.flush()

    def ask(self, *names: FileName) -> tuple[threading.Event, list[Records]]:
        answered, answers = threading.Event(), []

        def then(records: Records) -> None:
            answers.append(records)
            answered.set()

        assert self.leading.read(names, then)
        return answered, answers

    def read(self, *names: FileName) -> Records:
        answered, answers = self.ask(*names)
        assert answered.wait(WAIT_S)
        return answers.pop()

    def holders(self, name: FileName) -> list[int]:
        """Return the ranks that have a file of this name."""
        paths = {rank: store.home / name.file_name for rank, store in self.stores.items()}
        return [rank for rank, path in sorted(paths.items()) if path.exists()]

    def settle(self) -> None:
        """Wait until every follower has done what it was told."""
        self.commands.request("nothing")

    def flush(self) -> bool:
        """Wait until every rank has written what it was told; say whether all have."""
        is_written = self.leading.flush(WAIT_S)
        self.settle()
        return is_written and all(each.disk.thread.flush(WAIT_S) for each in self.followers)

    def close(self) -> None:
        for store in self.stores.values():
            store.gate.set()
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
