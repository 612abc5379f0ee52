"""Joins workers' movers of KV over a real relay, with files of real format and no model."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hearth.proxy.pool.kv_relay import KVRelay
from hearth.shared.kv_move_messages import Chunk, Fetch, Found, KVMove, Seek
from hearth.worker.cache.block_hash import PrefixHash, key_root, pack, prefix_hashes, root_hash
from hearth.worker.cache.extent_store import Layout
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Array, Record
from hearth.worker.disk.file_names import FileKind
from hearth.worker.disk.file_store import FileStore
from hearth.worker.remote_kv.held_prefixes import HeldPrefixes
from hearth.worker.remote_kv.kv_receiver import KVReceiver, Move
from hearth.worker.remote_kv.kv_sender import KVSender
from hearth.worker.remote_kv.moved_files import ModelBytes, MoveRules

RUN = 300  # tokens from one cut to the next
ROW_BYTES = 64
STATE_BYTES = 2048
WINDOW = 450
RULE = "r2.300"
PORTABLE = root_hash(["portable"])
FULL = Layout(has_state=True, window=WINDOW)  # rows, windows and a state
PLAIN = Layout(has_state=False, window=0)
WAIT_S = 60.0


def prompt_of(tokens: Sequence[int], root: PrefixHash, key: str = "mine") -> PrefixQuery:
    """Return a prompt of a key on the machine with this root."""
    packed = pack(tokens)
    own, cuts = key_root(root, key), list(range(RUN, len(tokens), RUN))
    portable = key_root(PORTABLE, key)
    names = prefix_hashes(own, packed, cuts)
    return PrefixQuery(packed, cuts, names, root=own, portable_root=portable)


def records_of(query: PrefixQuery, root: PrefixHash, layout: Layout, seed: int = 0) -> list[Record]:
    """Return the files of a prompt that was read to its last cut, all that a resume there takes."""
    random = np.random.default_rng(seed)

    def arrays(nbytes: int) -> tuple[Array, ...]:
        return (Array("0.0", "U8", random.integers(0, 256, nbytes, np.uint8)),)

    assert query.root is not None
    found = []
    starts = zip([0, *query.cuts], [query.root, *query.names], strict=True)
    ends = zip(query.cuts, query.names, strict=True)
    for (start, before), (end, name) in zip(starts, ends, strict=False):
        tokens = query.tokens[start:end]
        kinds = {FileKind.ROWS: RUN * ROW_BYTES}
        if layout.window:
            kinds[FileKind.WINDOW] = RUN * ROW_BYTES
        if layout.has_state and end == query.limit:
            kinds[FileKind.STATE] = STATE_BYTES
        found += [
            Record(root, before, name, start, tokens, True, kind, arrays(nbytes), RULE)
            for kind, nbytes in kinds.items()
        ]
    return found


@dataclass
class Client:
    """Whose prompt it is."""

    peer: bytes = b"proxy"
    is_gone: bool = False


class Machine:
    """One worker's part: its files, and what sends and takes them. Also a link to the relay."""

    def __init__(
        self, number: int, directory: Path, root: PrefixHash, layout: Layout, is_exact: bool = False
    ) -> None:
        self.worker_id, self.root, self.layout = number, root, layout
        self.is_remote = self.is_ready = True
        self.load = 0
        self.store = FileStore(directory, root, 1 << 30, 0, rule=RULE)
        self.disk = DiskThread(self.store)
        self.held = HeldPrefixes()
        self.on_sent: Callable[[KVMove], KVMove | None] = lambda message: message  # a fault's place
        self.relay: KVRelay | None = None
        rules = MoveRules(root, RULE, is_exact, ModelBytes(ROW_BYTES, ROW_BYTES, STATE_BYTES))
        self.sender = KVSender(self.disk, root, layout, self.held, self._post)
        self.fits: Callable[[Collection[tuple[int, int]]], bool] = lambda rows: True
        self.receiver = KVReceiver(self.disk, rules, self._post, lambda rows: self.fits(rows))

    def _post(self, peer: bytes, message: KVMove) -> None:
        changed = self.on_sent(message)
        if changed is not None and self.relay is not None:
            self.relay.hear(self.worker_id, changed)

    def send_kv(self, message: KVMove) -> None:
        assert isinstance(message, Seek | Found | Fetch | Chunk), message
        if isinstance(message, Seek | Fetch):
            self.sender.hear(b"proxy", message)
        else:
            self.receiver.hear(message)

    def keep(self, query: PrefixQuery, records: Sequence[Record]) -> None:
        """Have these files on disk, and tell the relay of the prompt."""
        for record in records:
            assert self.store.put(record)
        self.held.note(query)
        self.tell()

    def tell(self) -> None:
        assert self.relay is not None
        self.relay.hear(self.worker_id, self.held.changes())

    def ask(
        self, query: PrefixQuery, kept: int = 0, speed: float = 1.0, client: Client | None = None
    ) -> tuple[Move | None, threading.Event]:
        """Seek a prompt's KV; the event is set when no more of it will come."""
        done = threading.Event()
        asker = client or Client()
        move = self.receiver.seek(query, asker, {0, kept}, kept, speed, done.set)
        return move, done

    def get(self, query: PrefixQuery, kept: int = 0, speed: float = 1.0) -> None:
        """Seek a prompt's KV, and wait until as much is there as will come."""
        move, done = self.ask(query, kept, speed)
        assert move is not None and done.wait(WAIT_S)

    def files(self) -> set[str]:
        self.store.refresh()
        return {path.name for path in self.store.path_of(ANY).parent.glob("*.safetensors")}


ANY = records_of(prompt_of(range(RUN + 1), PORTABLE), PORTABLE, PLAIN)[0].name


@dataclass
class Network:
    """Two machines and the proxy's relay between them."""

    one: Machine
    two: Machine
    relay: KVRelay = field(init=False)

    def __post_init__(self) -> None:
        self.relay = KVRelay({self.one.worker_id: self.one, self.two.worker_id: self.two})
        self.one.relay = self.two.relay = self.relay

    def close(self) -> None:
        for machine in (self.one, self.two):
            machine.disk.close()


def garbled(message: KVMove) -> KVMove:
    """Return a message whose bytes have one bit turned; others as they are."""
    if not isinstance(message, Chunk):
        return message
    data = bytearray(message.data)
    data[len(data) // 2] ^= 1
    return replace(message, data=bytes(data))
