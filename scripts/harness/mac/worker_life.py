"""Leads a real worker through a whole life on a fake Mac: start, requests, evictions, stop.

No proxy and no request on the wire: what the prompt thread would hand over is put in by hand. All
else is the worker's own, on a thread of its own, as MLX's streams end with a worker.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from hearth.shared.settings import Settings, load_settings
from hearth.shared.wire_messages import Failed, Finished, Sampling
from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.main import Worker
from hearth.worker.schedule.request_state import AnswerDeltas, ClientLease, Request
from hearth.worker.serving_parts import ServingParts
from hearth.worker.setup.kv_setup import cache_root, cut_rule_of
from hearth.worker.setup.load_setup import load_all
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.output_processor import OutputProcessor
from hearth.worker.threads.inference_thread import InferenceThread
from scripts.harness.mac.fake_mac import FakeMac

ANSWER_TOKENS: Final = 6
PROMPTS: Final = (300, 310, 320, 700, 900)  # the first three share a batch
LIFE_S_MAX: Final = 60.0


@dataclass
class Life:
    """What came of a worker's life."""

    ends: list[str] = field(default_factory=list)  # of its requests
    exit_code: int = 0


def lead_through(fake: FakeMac, model: Path, directory: Path, **settings: str) -> Life:
    """Have a worker live on `fake`, whose loop answers PROMPTS once and then ends.

    Its weights and its KV are followed as buffers of the fake's memory, after the load and after
    every step.
    """
    life = Life()

    def load(*rest: Any, **named: Any) -> LoadedModel:
        loaded = load_model(*rest, **named)
        fake.follow((array for _, array in tree_flatten(loaded.model.parameters())), "weights")
        return loaded

    def lead(_: InferenceThread) -> None:
        parts = worker._served
        assert parts is not None
        for number, count in enumerate(PROMPTS):
            ids = np.random.default_rng(number).integers(5, 200, count).tolist()
            parts.scheduler.submit(_request(made, parts, f"r{number}", ids))
        while not parts.scheduler.is_idle:
            for event in parts.scheduler.step():
                if isinstance(event, Finished | Failed):
                    life.ends.append(event.reason if isinstance(event, Finished) else event.code)
            fake.follow(_kv(parts.kv_manager), "kv")
        worker._shutdown.begin()

    environ = {"MODEL_PATH": str(model), "MAX_KV_SIZE_GB": "0", "LOG_ROOT": str(directory)}
    with (
        fake.installed(),
        mock.patch(f"{load_all.__module__}.load_model", load),
        mock.patch.object(InferenceThread, "run_once", lead),
    ):
        made = load_settings(environ | settings, None)
        worker = Worker(made, 0, f"ipc://{directory / 'worker.sock'}")
        thread = worker._shutdown.start_thread("inference", worker._inference)
        thread.join(LIFE_S_MAX)
        worker._jobs.put(None)
        worker._port.close()
        assert not thread.is_alive(), "the worker hangs"
        life.exit_code = worker._shutdown.exit_code
    return life


def _request(settings: Settings, parts: ServingParts, name: str, ids: list[int]) -> Request:
    """Return a request as the prompt thread makes it of a prompt's tokens."""
    cuts = cut_rule_of(parts.loaded, settings).cuts(ids)
    names = prefix_hashes(cache_root(parts.loaded, settings), pack(ids), cuts)
    lease = ClientLease(name, b"peer")
    lease.lease_until = float("inf")
    return Request(
        lease,
        ids,
        PrefixQuery(pack(ids), cuts, names),
        Sampling(temperature=0.0),
        ANSWER_TOKENS,
        OutputProcessor(Vocabulary(parts.loaded.tokenizer).detokeniser(), []),
        AnswerDeltas(name),
    )


def _kv(manager: Any) -> list[mx.array]:
    """Return the arrays of live caches and of all that is kept."""
    live = [layer.state for slot in manager.slots for layer in slot.cache]
    runs = [run for extent in manager.store.extents for run in (extent.body, extent.window)]
    rows = [layer.arrays for run in runs if run is not None for layer in run.layers]
    states = [node.snapshot.layers for node in manager.store.nodes if node.snapshot]
    tree: Any = tree_flatten([live, rows, states])
    return [array for _, array in tree if isinstance(array, mx.array)]
