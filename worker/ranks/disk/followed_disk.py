"""Keeps one rank's own KV files as rank 0 keeps its own."""

from collections.abc import Callable, Sequence
from typing import Any

from hearth.shared.errors import StartError
from hearth.shared.stop_signals import FLUSH_WAIT_S
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import FileKind, FileName, Record, parse
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.serialise_kv import UnreadableRecord, arrays_of
from hearth.worker.ranks.disk.leading_disk_thread import (
    FOUND_EVENT,
    record_from,
)
from hearth.worker.ranks.followed_kv import FollowedKV, FollowedRead
from hearth.worker.ranks.rank_link import Handle
from hearth.worker.ranks.transport.follower_link import FollowerLink

# Opens this rank's files: of a root, by the label of rank 0's cut rule, on the ranks' hosts.
OpenStore = Callable[[PrefixHash, str, Sequence[str]], FileStore | None]


class FollowedDisk:
    """One rank's files. Owner: the thread that does operations."""

    def __init__(self, link: FollowerLink, kv: FollowedKV, open_store: OpenStore) -> None:
        self._link = link
        self._kv = kv
        self._open_store = open_store
        self._thread: DiskThread | None = None
        self.operations: dict[str, Callable[..., Any]] = {
            "disk_open": self._open,
            "disk_lift_bound": lambda: self.thread.lift_bound(),
            "disk_write": self._write,
            "disk_read": self._read,
            "disk_take": self._take,
            "disk_discard": lambda name: self.thread.discard(self._name(name)),
            "disk_drop": lambda names: self.thread.drop(map(self._name, names)),
            "disk_clear": lambda: self.thread.clear(),
            "disk_report": lambda: self.thread.report(),
        }

    @property
    def thread(self) -> DiskThread:
        assert self._thread is not None, "rank 0 opens the disk first"
        return self._thread

    def close(self) -> None:
        """Write what waits, and end the I/O thread, if there is one; rank 0 waits for that."""
        if self._thread is not None:
            self._thread.flush(FLUSH_WAIT_S)
            self._thread.close()

    # ------------------------------------------------------------ what is told

    def _open(self, root: bytes, label: str, hosts: list[str], queue_bytes: int) -> list[Any]:
        """Open this rank's files; return how many bytes they may take, or why they may not be."""
        try:
            store = self._open_store(PrefixHash(root), label, hosts)
        except StartError as error:
            return [0, str(error)]
        if store is None:
            return [0, "MAX_KV_SIZE_GB is 0 there"]
        self._thread = DiskThread(store, queue_bytes)
        return [store.bytes_max, ""]

    def _name(self, told: str) -> FileName:
        name = parse(told, self.thread.file_store.rule)
        assert name is not None, told
        return name

    def _write(
        self, handle: Handle, is_needed: bool, told: str, position: int, tokens: bytes
    ) -> None:
        """Write rows or states; what the queue refuses is missing here, and so on all ranks."""
        name, root = self._name(told), self.thread.file_store.root
        is_state = name.kind is FileKind.STATE
        arrays = arrays_of(self._kv.states[handle] if is_state else self._kv.rows[handle])
        self.thread.write(record_from(name, position, tokens, root, arrays), is_needed)

    def _read(self, handle: Handle, names: list[Any]) -> None:
        read = self._kv.reads[handle] = FollowedRead()

        def found(records: Sequence[Record | None]) -> None:
            read.records = records
            self._link.send_event(FOUND_EVENT, handle, [record is not None for record in records])

        if not self.thread.read(list(map(self._name, names)), found):
            found([None] * len(names))

    def _take(self, read: Handle, index: int, handle: Handle) -> str:
        """Keep what was read of a record by a number; return why that cannot be, if so."""
        record = self._kv.reads[read].records[index]
        assert record is not None, "rank 0 was told that it is here"
        layers = self._kv.layers
        try:
            if record.kind is FileKind.STATE:
                self._kv.states[handle] = layers.state_from(record)
                return ""
            rows = layers.rows_from(record)
        except UnreadableRecord as reason:
            return str(reason)
        if record.kind is FileKind.ROWS and not layers.are_rows(rows, len(record.tokens)):
            return "rows of other shapes than the model's"
        self._kv.rows[handle] = rows
        return ""
