"""Joins what one worker tells, seeks, sends and takes of KV, and stands between its threads."""

from collections.abc import Callable, Collection
from typing import Any

from hearth.shared.kv_move_messages import Chunk, Fetch, Found, Seek
from hearth.shared.settings_from_env import Settings
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.kv.disk_tier import DiskTier
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.remote_kv.held_prefixes import HeldPrefixes
from hearth.worker.remote_kv.kv_receiver import Asker, KVReceiver, Move
from hearth.worker.remote_kv.kv_sender import KVSender, Post
from hearth.worker.remote_kv.moved_files import ModelBytes, MoveRules


class NoRemoteKV:
    """Moves nothing: what a worker has where no other keeps KV of use to it."""

    def seek(
        self,
        query: PrefixQuery,
        asker: Asker,
        kept_tokens: int,
        tokens_per_s: float,
        then: Callable[[], None],
    ) -> Move | None:
        """Ask for what lies behind the prompt's `kept_tokens`; None where nobody is asked.

        `then` is called once, on another thread, when as much is on disk as will come, unless the
        move is given up, or waits for another prompt's and is late then. `tokens_per_s` are a
        prefill's. Inference thread, as the next three.
        """
        return None

    def give_up(self, move: Move) -> None:
        """Nobody waits for a move any more."""

    def note(self, query: PrefixQuery) -> None:
        """Have it told that a prompt was read, to its last cut."""

    def forget(self) -> None:
        """The cache is emptied: nothing is told any more, and what is on its way not kept."""

    def tell(self, peers: Collection[bytes]) -> None:
        """Tell proxies what has changed since the last time, and new ones all. Wire thread."""

    def hear(self, peer: bytes, message: Seek | Found | Fetch | Chunk) -> None:
        """Take a message of a proxy. Wire thread."""

    def report(self) -> dict[str, Any] | None:
        """Return for `/v1/cache` what was moved, and what came in the way. Any thread."""
        return None


class KVExchange(NoRemoteKV):
    """The four parts together. `post` sends to a proxy, from any thread.

    Nothing is told or sought before a proxy has asked for it: with the workers of one machine
    alone, which share a directory, none does.
    """

    def __init__(self, kv_manager: KVManager, disk: DiskTier, post: Post) -> None:
        """`disk` is the KV manager's."""
        store, rules, uncached = kv_manager.store, kv_manager.rules, kv_manager.uncached
        state = uncached.unwritten_bytes(0)
        sizes = ModelBytes(kv_manager.row_bytes(None), uncached.unwritten_bytes(1) - state, state)
        self._rules = MoveRules(store.root.name, rules.cut_label, rules.is_exact, sizes)
        self._held = HeldPrefixes()
        self._sender = KVSender(disk.thread, store.root.name, store.layout, self._held, post)
        self._receiver = KVReceiver(disk.thread, self._rules, post, disk.fits)
        self._disk = disk
        self._post = post
        self._peers: frozenset[bytes] = frozenset()  # that know what is held

    # ------------------------------------------------------------ the inference thread

    def seek(
        self,
        query: PrefixQuery,
        asker: Asker,
        kept_tokens: int,
        tokens_per_s: float,
        then: Callable[[], None],
    ) -> Move | None:
        if asker.peer not in self._peers or query.portable_root is None:
            return None
        reached = self._disk.places(query, self._rules.is_exact)
        return self._receiver.seek(query, asker, reached, kept_tokens, tokens_per_s, then)

    def give_up(self, move: Move) -> None:
        self._receiver.give_up(move)

    def note(self, query: PrefixQuery) -> None:
        if self._peers:
            self._held.note(query)

    def forget(self) -> None:
        self._receiver.forget()
        self._held.clear()

    def report(self) -> dict[str, Any]:
        counts = self._receiver.counts + self._sender.counts
        return {"counts": dict(counts), "bytes_per_s": self._receiver.speed.report()}

    # ------------------------------------------------------------ the wire thread

    def tell(self, peers: Collection[bytes]) -> None:
        changes = self._held.changes()
        for peer in peers:
            told = changes if peer in self._peers else self._held.all()
            if told.added or told.dropped:
                self._post(peer, told)
        self._peers = frozenset(peers)

    def hear(self, peer: bytes, message: Seek | Found | Fetch | Chunk) -> None:
        if isinstance(message, Seek | Fetch):
            self._sender.hear(peer, message)
        else:
            self._receiver.hear(message)


def make_remote_kv(
    kv_manager: KVManager | NullKVManager, post: Post, settings: Settings
) -> NoRemoteKV:
    """Return what moves KV from and to workers elsewhere: files, where any are kept.

    Of a model over several ranks each rank has its own part of them: none is moved.
    """
    if isinstance(kv_manager, NullKVManager) or kv_manager.disk is None or settings.ranks > 1:
        return NoRemoteKV()
    return KVExchange(kv_manager, kv_manager.disk, post)
