"""Joins socketless workers with directories of their own by the proxy's relay."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.proxy.pool.kv_relay import KVRelay
from hearth.shared.kv_move_messages import Chunk, Fetch, Found, KVMove, Seek
from hearth.worker.cache.block_hash import PrefixHash, key_root, root_hash
from hearth.worker.remote_kv.kv_exchange import KVExchange
from scripts.harness.socketless_worker import Answer, Machine
from tests.helpers.worker.disk_workers import Workers

PORTABLE = root_hash(["portable"])
PEER = b"peer"


@dataclass
class Joined:
    """One machine's worker, as a link of the relay."""

    worker_id: int
    machine: Machine
    exchange: KVExchange
    workers: Workers
    root: PrefixHash
    is_remote: bool = True
    is_ready: bool = True
    load: int = 0

    def send_kv(self, message: KVMove) -> None:
        assert isinstance(message, Seek | Found | Fetch | Chunk), message
        self.exchange.hear(PEER, message)

    def ask(self, ids: list[int], key: str = "mine") -> Answer:
        """Ask as a key's client, and have what is kept then told."""
        answer = self.machine.ask(
            ids, root=key_root(self.root, key), portable_root=key_root(PORTABLE, key)
        )
        self.workers.flush()
        self.exchange.tell([PEER])
        return answer


class JoinedWorkers:
    """As many workers as were added, each on a machine of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.links: dict[int, Joined] = {}
        self.relay = KVRelay(self.links)

    def add(self, name: str, chip: str, **rules: Any) -> Joined:
        """Start a worker on a `chip`, which names its root."""
        number, root = len(self.links), root_hash([chip])
        workers = Workers(self._directory / str(number))
        made: list[KVExchange] = []

        def connect(keeper: Any) -> KVExchange:
            made.append(KVExchange(keeper, keeper.disk, self._post_of(number)))
            return made[0]

        machine = workers.start(name, root, connect=connect, tiny=True, **rules)
        self.links[number] = Joined(number, machine, made[0], workers, root)
        made[0].tell([PEER])
        return self.links[number]

    def _post_of(self, number: int) -> Callable[[bytes, KVMove], None]:
        return lambda _peer, message: self.relay.hear(number, message)

    def close(self) -> None:
        for link in self.links.values():
            link.workers.kill()
