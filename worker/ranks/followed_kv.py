"""Holds a follower's part of the KV that rank 0 has numbered, in memory and in files.

Owner: the thread that loaded the model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hearth.shared.errors import StartError
from hearth.shared.stop_signals import FLUSH_WAIT_S
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import FileKind, FileName, Record, parse
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.layer_adapters import LayerMap, rounded
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates
from hearth.worker.kv.serialise_kv import UnreadableRecord, arrays_of
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.leading_kv import (
    EMPTY_HANDLE,
    FOUND_EVENT,
    format_from,
    kinds_of,
    record_from,
)
from hearth.worker.ranks.rank_link import Handle


class FollowedKV:
    """Holds a follower's caches, rows and states by rank 0's handles, with their operations.

    Invariant: a handle stands for one object from its first operation until it is dropped.
    """

    def __init__(self) -> None:
        self.caches: dict[Handle, list[Any]] = {}
        self.rows: dict[Handle, KVRows] = {EMPTY_HANDLE: KVRows(())}
        self.states: dict[Handle, LayerStates] = {EMPTY_HANDLE: LayerStates(())}
        self.reads: dict[Handle, list[Record | None]] = {}  # a list is empty until its read ends
        self._layers: LayerMap | None = None  # None if the model's KV is not kept
        self.operations: dict[str, Callable[..., Any]] = {
            "layer_map": self._map,
            "copy_rows": self._copy_rows,
            "put_rows": lambda cache, sources, position, rows: self.layers.put_rows(
                self.caches[cache], self._runs(sources), position, rows
            ),
            "reserve": self._reserve,
            "trim": lambda cache, position: self.layers.trim(self.caches[cache], position),
            "copy_window": self._copy_window,
            "put_window": lambda cache, sources, position: self.layers.put_window(
                self.caches[cache], self._runs(sources), position
            ),
            "take_state": self._take_state,
            "put_state": lambda cache, state, position: self.layers.put_state(
                self.caches[cache], self.states[state], position
            ),
        }

    @property
    def layers(self) -> LayerMap:
        assert self._layers is not None, "rank 0 has mapped the layers before it uses them"
        return self._layers

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop the objects whose handles rank 0 has released."""
        for handle in map(Handle, numbers):
            self.caches.pop(handle, None)
            self.rows.pop(handle, None)
            self.states.pop(handle, None)
            self.reads.pop(handle, None)

    def _map(self, probe: Handle, rows: int) -> list[Any]:
        """Map the layers; return [reason why no KV can be kept, kinds, bytes of a live cache]."""
        try:
            self._layers = LayerMap(self.caches[probe])
        except UnknownCache as unknown:
            return [str(unknown), [], 0]
        return ["", kinds_of(self._layers), self._layers.slot_bytes(rows, None)]

    def _copy_rows(
        self, handle: Handle, cache: Handle, start: int, end: int, form: list[Any] | None
    ) -> None:
        source = self.caches[cache]
        self.rows[handle] = self.layers.copy_rows(source, start, end, format_from(form))

    def _reserve(self, cache: Handle, rows: int, room: int) -> None:
        """Reserve room for `rows` tokens, or for more if rank 0 reserved more."""
        self.layers.has_room = lambda _nbytes: room > rounded(rows)
        self.layers.reserve(self.caches[cache], rows)

    def _copy_window(self, handle: Handle, cache: Handle, tokens: int, behind: int) -> None:
        self.rows[handle] = self.layers.copy_window(self.caches[cache], tokens, behind)

    def _take_state(self, handle: Handle, cache: Handle) -> None:
        self.states[handle] = self.layers.take_state(self.caches[cache])

    def _runs(self, sources: Sequence[Sequence[int]]) -> list[tuple[LayerRows, ...]]:
        """Return the rows at these sources of rank 0."""
        found = []
        for number, start, end in sources:
            handle = Handle(number)
            if handle in self.caches:
                found.append(self.layers.rows(self.caches[handle], start, end))
            else:
                kept = self.rows[handle]
                found.append(self.layers.kept_rows(kept, start, end if end >= 0 else None))
        return found


# (root, label of rank 0's cut rule, hosts of the ranks) -> this rank's files, if it writes any
OpenStore = Callable[[PrefixHash, str, Sequence[str]], FileStore | None]


class FollowedDisk:
    """Holds the KV files of one follower. Owner: the thread that does operations."""

    def __init__(self, link: FollowerLink, kv: FollowedKV, open_store: OpenStore) -> None:
        self._link = link
        self._kv = kv
        self._open_store = open_store
        self._thread: DiskThread | None = None
        self.operations: dict[str, Callable[..., Any]] = {
            "disk_open": self._open,
            "disk_lift_bound": lambda: self.thread.lift_limit(),
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
        """Write the queue and end the I/O thread, if there is one; rank 0 waits for the end."""
        if self._thread is not None:
            self._thread.flush(FLUSH_WAIT_S)
            self._thread.close()

    # ------------------------------------------------------------ operations

    def _open(self, root: bytes, label: str, hosts: list[str], queue_bytes: int) -> list[Any]:
        """Open this rank's files; return [byte limit, ""] or [0, the reason for having none]."""
        try:
            store = self._open_store(PrefixHash(root), label, hosts)
        except StartError as error:
            return [0, str(error)]
        if store is None:
            return [0, "MAX_KV_SIZE_GB is 0 there"]
        self._thread = DiskThread(store, queue_bytes)
        return [store.bytes_max, ""]

    def _name(self, file_name: str) -> FileName:
        name = parse(file_name, self.thread.file_store.rule)
        assert name is not None, file_name
        return name

    def _write(
        self, handle: Handle, is_needed: bool, file_name: str, position: int, tokens: bytes
    ) -> None:
        """Write rows or states; a record that this queue refuses counts as missing on all ranks."""
        name, root = self._name(file_name), self.thread.file_store.root
        is_state = name.kind is FileKind.STATE
        arrays = arrays_of(self._kv.states[handle] if is_state else self._kv.rows[handle])
        self.thread.write(record_from(name, position, tokens, root, arrays), is_needed)

    def _read(self, handle: Handle, names: list[Any]) -> None:
        read: list[Record | None] = []
        self._kv.reads[handle] = read

        def found(records: Sequence[Record | None]) -> None:
            read[:] = records
            self._link.send_event(FOUND_EVENT, handle, [record is not None for record in records])

        if not self.thread.read(list(map(self._name, names)), found):
            found([None] * len(names))

    def _take(self, read: Handle, index: int, handle: Handle) -> str:
        """Keep record `index` of `read` under `handle`; return "" or why it is unusable."""
        record = self._kv.reads[read][index]
        assert record is not None, "rank 0 was told that it is here"
        layers = self._kv.layers
        try:
            if record.kind is FileKind.STATE:
                self._kv.states[handle] = layers.state_from(record)
                return ""
            rows = layers.rows_from(record)
        except UnreadableRecord as unreadable:
            return str(unreadable)
        end = record.position + len(record.tokens)
        if record.kind is FileKind.ROWS and not layers.are_rows(rows, record.position, end):
            return "rows of other shapes than the model's"
        self._kv.rows[handle] = rows
        return ""
