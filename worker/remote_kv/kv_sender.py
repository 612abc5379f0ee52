"""Sends files of kept KV to workers elsewhere, piece by piece, as they ask for each."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from hearth.shared.kv_move_messages import (
    CHUNK_BYTES,
    SEEK_NAMES_MAX,
    Chunk,
    Fetch,
    Found,
    KVMove,
    Seek,
)
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.cache.extent_store import Layout
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_names import FileKind, FileName
from hearth.worker.disk.resume_files import part_of, resume_files, size_of
from hearth.worker.remote_kv.held_prefixes import HeldPrefixes

OFFERS_MAX: Final = 32  # that can be fetched; the last used stay
OFFSET_MAX: Final = 1 << 40

Post = Callable[[bytes, KVMove], None]  # (peer, message); any thread


class KVSender:
    """Answers Seek and Fetch, on the I/O thread, behind all that the disk has to do otherwise.

    Only files of an offer are sent, and an offer is made to whoever names a prefix: its tokens and
    its API key are in that name, and nobody else can make it.
    Invariant: there are at most OFFERS_MAX offers.
    Owner: the I/O thread; `hear` is the wire thread's.
    """

    def __init__(
        self,
        disk: DiskThread,
        root: PrefixHash,
        layout: Layout,
        held: HeldPrefixes,
        post: Post,
    ) -> None:
        """`root` is what the files are named under."""
        self.counts: Counter[str] = Counter()
        self._disk = disk
        self._root = root
        self._layout = layout
        self._held = held
        self._post = post
        self._offers: OrderedDict[tuple[bytes, str], Sequence[FileName]] = OrderedDict()

    def hear(self, peer: bytes, message: Seek | Fetch) -> None:
        """Answer later. Where the disk has no time there is none, and whoever asks gives up."""
        if isinstance(message, Seek):
            self._disk.later(partial(self._offer, peer, message))
        else:
            self._disk.later(partial(self._send, peer, message))

    def _offer(self, peer: bytes, seek: Seek) -> None:
        found = Found.nobody(seek.seek_id)
        for name in seek.names[:SEEK_NAMES_MAX]:
            files = self._files(name)
            if files:
                self._offers[peer, seek.seek_id] = files
                sizes = [size_of(self._disk.file_store.path_of(file)) for file in files]
                names = [file.file_name for file in files]
                found = Found(seek.seek_id, name, self._root, names, sizes)
                break
        while len(self._offers) > OFFERS_MAX:
            self._offers.popitem(last=False)
        self.counts["offers" if found.files else "offers_none"] += 1
        self._post(peer, found)

    def _files(self, name: bytes) -> list[FileName]:
        held = self._held.find(name)
        if held is None:
            return []
        files = resume_files(self._disk.file_store, self._layout, held.root, held.end)
        there = self._disk.file_store.at(held.end)
        if not files and not any(file.kind is FileKind.ROWS for file in there):
            self._held.drop(name)
        return files

    def _send(self, peer: bytes, fetch: Fetch) -> None:
        files = self._offers.get((peer, fetch.seek_id), ())
        data = b""
        nbytes = min(fetch.nbytes, CHUNK_BYTES)
        if 0 <= fetch.file < len(files) and 0 <= fetch.offset < OFFSET_MAX and nbytes > 0:
            self._offers.move_to_end((peer, fetch.seek_id))
            path = self._disk.file_store.path_of(files[fetch.file])
            data = part_of(path, fetch.offset, nbytes)
        self.counts["sent_bytes"] += len(data)
        self._post(peer, Chunk(fetch.seek_id, fetch.file, fetch.offset, data))
