"""Keeps one rank's own KV files as rank 0 keeps its own."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Record
from hearth.worker.disk.file_names import FileKind
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.serialise_kv import UnreadableRecord, arrays_of_rows, arrays_of_state
from hearth.worker.ranks.disk.leading_disk_thread import (
    FOUND_EVENT,
    LOST_EVENT,
    QUEUE_EVENT,
    name_from,
    record_from,
    told_name,
)
from hearth.worker.ranks.followed_kv import FollowedKV, FollowedRead
from hearth.worker.ranks.rank_link import FollowerLink, Handle

UNLIMITED: Final = 1 << 62  # rank 0 asks how long the queue is

# Opens this rank's files: of a root, by the label of rank 0's cut rule, on the ranks' hosts.
OpenStore = Callable[[PrefixHash, str, Sequence[str]], FileStore | None]


class FollowedDisk:
    """One rank's files. Owner: the thread that does operations, but for what tells of writing."""

    def __init__(self, link: FollowerLink, kv: FollowedKV, open_store: OpenStore) -> None:
        self._link = link
        self._kv = kv
        self._open_store = open_store
        self._thread: DiskThread | None = None
        self._root = PrefixHash(b"")
        self._writes = 0  # that were told
        self._queue_said = threading.Lock()  # what is said last is what was true last
        self.operations: dict[str, Callable[..., Any]] = {
            "disk_open": self._open,
            "disk_write": self._write,
            "disk_read": self._read,
            "disk_take": self._take,
            "disk_discard": lambda name: self.thread.discard(name_from(name)),
            "disk_drop": lambda names: self.thread.drop(map(name_from, names)),
            "disk_clear": self._clear,
            "disk_report": lambda: self.thread.report(),
        }

    @property
    def thread(self) -> DiskThread:
        assert self._thread is not None, "rank 0 opens the disk first"
        return self._thread

    def close(self) -> None:
        """End the I/O thread, if there is one; rank 0 has waited for what is written."""
        if self._thread is not None:
            self._thread.close()

    # ------------------------------------------------------------ what is told

    def _open(self, root: bytes, label: str, hosts: list[str]) -> list[Any]:
        """Open this rank's files; return how many bytes they may take, or why they may not be."""
        try:
            store = self._open_store(PrefixHash(root), label, hosts)
        except StartError as error:
            return [0, str(error)]
        if store is None:
            return [0, "MAX_KV_SIZE_GB is 0 there"]
        self._root = store.root
        self._thread = DiskThread(store, UNLIMITED, self._note_put)
        return [store.bytes_max, ""]

    def _write(self, handle: Handle, told: list[Any], is_needed: bool) -> None:
        """Write rows or states."""
        if name_from(told[0]).kind is FileKind.STATE:
            arrays = arrays_of_state(self._kv.states[handle])
        else:
            arrays = arrays_of_rows(self._kv.rows[handle].layers)
        with self._queue_said:
            self._writes += 1
            self.thread.write(record_from(told, self._root, arrays), is_needed)
            self._say_queue()

    def _read(self, handle: Handle, names: list[Any]) -> None:
        read = self._kv.reads[handle] = FollowedRead()

        def found(records: Sequence[Record | None]) -> None:
            read.records = records
            self._link.send_event(FOUND_EVENT, handle, [record is not None for record in records])

        if not self.thread.read(list(map(name_from, names)), found):
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

    def _clear(self) -> None:
        with self._queue_said:
            self.thread.clear()
            self._say_queue()

    # ------------------------------------------------------------ what rank 0 is told

    def _note_put(self, record: Record, is_kept: bool) -> None:
        """Tell rank 0 how far writing has come. The I/O thread."""
        if not is_kept:
            self._link.send_event(LOST_EVENT, told_name(record.name))
        with self._queue_said:
            self._say_queue()

    def _say_queue(self) -> None:
        self._link.send_event(QUEUE_EVENT, self._writes, self.thread.queue_bytes)
