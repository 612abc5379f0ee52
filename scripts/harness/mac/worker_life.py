"""Leads a real worker through a whole life on a fake Mac: start, requests, evictions, stop.

No proxy and no request on the wire: what the prompt thread would hand over is put in by hand. All
else is the worker's own, on a thread of its own, as MLX's streams end with a worker.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from hearth.shared.settings_from_env import load_settings
from hearth.shared.wire_messages import Failed, Finished, Sampling
from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.main import ServingParts, Worker
from hearth.worker.schedule.request_state import ClientLease, Request
from hearth.worker.setup.cut_rule_setup import cut_rule_of
from hearth.worker.setup.kv_setup import cache_root
from hearth.worker.setup.load_setup import load_all
from hearth.worker.shutdown import Shutdown
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.output_processor import OutputProcessor
from scripts.harness.mac.fake_mac import FakeMac

ANSWER_TOKENS: Final = 6
PROMPTS: Final = (300, 310, 320, 700, 900)  # the first three share a batch
STEPS_MAX: Final = 5_000
LIFE_S_MAX: Final = 60.0


class LedWorker(Worker):
    """A worker whose loop is `lead`: called once when it serves, with its parts."""

    def __init__(
        self, settings: dict[str, str], endpoint: Path, lead: Callable[[ServingParts], None]
    ) -> None:
        super().__init__(load_settings(settings, None), 0, f"ipc://{endpoint}")
        self._lead = lead
        self._shutdown = LedShutdown(self._port.wake, self._led)

    def live(self) -> int:
        """Serve from load to end; return the exit code."""
        thread = self._shutdown.start_thread("inference", self._inference)
        thread.join(LIFE_S_MAX)
        self._jobs.put(None)
        self._port.close()
        assert not thread.is_alive(), "the worker hangs"
        return self._shutdown.exit_code

    def _led(self) -> None:
        assert self._parts is not None
        self._lead(self._parts)

    def request(self, parts: ServingParts, name: str, ids: list[int]) -> Request:
        """Return a request as the prompt thread makes it of a prompt's tokens."""
        rule = cut_rule_of(parts.loaded, self._settings)
        cuts = rule.cuts(ids)
        root = cache_root(parts.loaded, self._settings)
        names = prefix_hashes(root, pack(ids), cuts)
        lease = ClientLease(name, b"peer")
        lease.lease_until = float("inf")
        output = OutputProcessor(Vocabulary(parts.loaded.tokenizer).detokeniser(), [])
        query = PrefixQuery(pack(ids), cuts, names)
        return Request(lease, ids, query, Sampling(temperature=0.0), ANSWER_TOKENS, output)


class LedShutdown(Shutdown):
    """Leads a worker when its loop first asks whether it ends, and then ends it."""

    def __init__(self, wake: Callable[[], None], lead: Callable[[], None]) -> None:
        super().__init__(wake)
        self._lead = lead

    def is_begun(self) -> bool:
        if not super().is_begun():
            self._lead()
            self.begin()
        return True


@dataclass
class Life:
    """What came of a worker's life."""

    ends: list[str] = field(default_factory=list)  # of its requests
    exit_code: int = 0


def lead_through(fake: FakeMac, model: Path, directory: Path, **settings: str) -> Life:
    """Have a worker live on `fake`.

    Its weights and its KV are followed as buffers of the fake's memory, after the load and after
    every step.
    """
    life = Life()

    def load(*rest: Any, **named: Any) -> LoadedModel:
        loaded = load_model(*rest, **named)
        fake.follow((array for _, array in tree_flatten(loaded.model.parameters())), "weights")
        return loaded

    def lead(parts: ServingParts) -> None:
        for number, count in enumerate(PROMPTS):
            ids = np.random.default_rng(number).integers(5, 200, count).tolist()
            parts.scheduler.submit(worker.request(parts, f"r{number}", ids))
        for _ in range(STEPS_MAX):
            if parts.scheduler.is_idle:
                break
            life.ends.extend(_ends(parts))
            fake.follow(_kv(parts), "kv")

    environ = {"MODEL_PATH": str(model), "MAX_KV_SIZE_GB": "0", "LOG_ROOT": str(directory)}
    with fake.installed(), mock.patch(f"{load_all.__module__}.load_model", load):
        worker = LedWorker(environ | settings, directory / "worker.sock", lead)
        life.exit_code = worker.live()
    return life


def _kv(parts: ServingParts) -> Iterator[mx.array]:
    manager: Any = parts.kv_manager
    for slot in manager.slots:
        yield from _arrays([layer.state for layer in slot.cache])
    for extent in manager.store.extents:
        for kept in (extent.body, extent.window):
            yield from () if kept is None else _arrays([rows.arrays for rows in kept.layers])
    for joint in manager.store.joints:
        if joint.snapshot is not None:
            yield from _arrays(list(joint.snapshot.layers))


def _arrays(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _arrays(each)


def _ends(parts: ServingParts) -> Iterator[str]:
    for event in parts.scheduler.step():
        if isinstance(event, Finished):
            yield event.reason
        elif isinstance(event, Failed):
            yield event.code
