"""Does with one rank's own KV files what rank 0 does with its own."""

import threading
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from hearth.shared.errors import StartError
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Array, Record
from hearth.worker.disk.file_names import FileKind
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import KVRows, LayerStates
from hearth.worker.kv.serialise_kv import UnreadableRecord, arrays_of_rows, arrays_of_state
from hearth.worker.ranks.leading_disk_thread import FOUND_EVENT, LOST_EVENT, QUEUE_EVENT
from hearth.worker.ranks.named_kv import EMPTY_HANDLE
from hearth.worker.ranks.rank_link import FollowerLink, Handle
from hearth.worker.ranks.told_records import name_from, record_from, told_name

UNLIMITED = 1 << 62  # rank 0 asks how long the queue is

# Opens this rank's files: of a root, by the label of rank 0's cut rule, on the ranks' hosts.
OpenStore = Callable[[PrefixHash, str, Sequence[str]], FileStore | None]


class FollowedRead:
    """What this rank has read of a read of all ranks, until rank 0 lets go of it."""

    def __init__(self) -> None:
        self.records: Sequence[Record | None] = ()


class FollowedDisk:
    """One rank's files. Owner: the thread that does operations, but for what the I/O thread says.

    `kept` has what all ranks know by numbers: rows, states, and what was read.
    """

    def __init__(
        self,
        link: FollowerLink,
        kept: MutableMapping[Handle, Any],
        layers: Callable[[], LayerMap],
        open_store: OpenStore,
    ) -> None:
        self._link = link
        self._kept = kept
        self._layers = layers
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
        """End the I/O thread, if there is one."""
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

    def _write(self, handle: Handle, told: list[Any], bits: int, is_needed: bool) -> None:
        record = record_from(told, self._root, self._arrays(handle, bits))
        with self._queue_said:
            self._writes += 1
            self.thread.write(record, is_needed)
            self._say_queue()

    def _arrays(self, handle: Handle, bits: int) -> tuple[Array, ...]:
        if handle == EMPTY_HANDLE:
            return ()
        kept = self._kept[handle]
        if isinstance(kept, LayerStates):
            return arrays_of_state(kept, bits)
        assert isinstance(kept, KVRows), type(kept)
        return arrays_of_rows(kept.layers)

    def _read(self, handle: Handle, names: list[Any]) -> None:
        read = self._kept[handle] = FollowedRead()

        def found(records: Sequence[Record | None]) -> None:
            read.records = records
            self._link.send_event(FOUND_EVENT, handle, [record is not None for record in records])

        if not self.thread.read(list(map(name_from, names)), found):
            found([None] * len(names))

    def _take(self, read: Handle, index: int, handle: Handle) -> str:
        """Keep what was read of a record by a number; return why that cannot be, if so."""
        record = self._kept[read].records[index]
        assert record is not None, "rank 0 was told that it is here"
        try:
            self._kept[handle] = self._taken(record)
        except UnreadableRecord as reason:
            return str(reason)
        return ""

    def _taken(self, record: Record) -> KVRows | LayerStates:
        layers = self._layers()
        if record.kind is FileKind.STATE:
            return layers.state_from(record)
        rows = layers.rows_from(record)
        if record.kind is FileKind.ROWS and not layers.are_rows(rows, len(record.tokens)):
            raise UnreadableRecord("rows of other shapes than this rank's")
        return rows

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
