"""Serves a model that computes next to nothing with several workers, and tells who read what."""

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from hearth.commands.replay.player import Target
from hearth.shared.openblas_preload import openblas_environment
from scripts.bench.routing.rules import TODAY
from scripts.bench.servers import free_port, ready, running
from scripts.fixtures.fixture_cache import cache_dir

KEY: Final = "bench"
REQUEST_WAIT_S_MAX: Final = 1_800.0
WORKER: Final = "hearth.worker.main"
QUICK_DISK: Final = "scripts.bench.routing.quick_disk_worker"
# One head or two of a few numbers: what is kept and read of such a model, and when, is what it is
# of any model of its kind.
_SMALL_CORE: Final = dict(
    hidden_size=32,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=16,
)
SMALL: Final[Mapping[str, dict[str, Any]]] = {
    "qwen3": _SMALL_CORE | dict(num_hidden_layers=1),
    "qwen3_5": dict(
        _SMALL_CORE,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "gpt_oss": dict(_SMALL_CORE),
}
_SETTINGS: Final = {
    "PROXY_HOST": "127.0.0.1",
    "PROXY_API_KEY": KEY,
    "PROXY_MODEL_ID": "local",
    "LOG_PROMPTS": "true",  # tells the ids of prompts
    "CACHE_RAM_BUDGET_MB": "1024",
    "MAX_KV_SIZE": "262144",
    "IDLE_PREFILL": "never",  # what idle time reads depends on how busy the machine is
    "DOCTOR": "off",
}
_FINISHED: Final = re.compile(r" worker-(\d+) \S+ finished request=(\S+) ")


def model_dir(name: str) -> Path:
    """Return the directory of a checkpoint of SMALL, which is made if need be."""
    from scripts.fixtures.make_fixture import TINY, make_text  # imports MLX

    target = cache_dir() / f"{name}-small-fp32"
    if not target.is_dir():
        make_text(name, TINY[name] | SMALL[name], target, "float32", None)
    return target


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs, all of its workers ready."""

    target: Target
    log: Path
    session: aiohttp.ClientSession

    def workers(self) -> dict[str, int]:
        """Return which worker has finished each request, by the request's id."""
        text = self.log.read_text(errors="replace")
        return {request: int(worker) for worker, request in _FINISHED.findall(text)}

    async def health(self) -> dict[str, Any]:
        async with self.session.get("/health") as response:
            told: dict[str, Any] = await response.json()
            return told

    async def all_finished(self, request_ids: set[str], wait_s: float = 10.0) -> dict[str, int]:
        """Return `workers` once the log has all of these requests, or that time is up."""
        found: dict[str, int] = {}
        for _ in range(int(wait_s / 0.1)):
            found = self.workers()
            if request_ids <= found.keys():
                break
            await asyncio.sleep(0.1)
        return found


@contextlib.asynccontextmanager
async def served(
    model: Path,
    workers: int,
    settings: Mapping[str, str],
    rule: str = TODAY,
    tokens_max: int = 4,
    worker: str = WORKER,
) -> AsyncIterator[Served]:
    """Run Hearth with so many workers in a directory of its own, for the length of the block.

    `worker` is the module that runs them.
    """
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        port, log = free_port(), Path(directory) / "hearth.log"
        places = {"RUN_DIR": "run", "LOG_ROOT": "logs", "KV_CACHE_DIR": "kv"}
        environment = os.environ | openblas_environment(os.environ) | _SETTINGS
        environment |= {name: f"{directory}/{place}" for name, place in places.items()}
        environment |= {"MODEL_PATH": str(model), "PROXY_PORT": str(port)}
        environment |= {"WORKERS": str(workers), **settings}
        target = Target(
            f"http://127.0.0.1:{port}",
            KEY,
            model="local",
            tokens_max=tokens_max,
            timeout_s=REQUEST_WAIT_S_MAX,
        )
        command = ["-m", "scripts.bench.routing.ruled_proxy", rule, worker]
        headers = {"authorization": f"Bearer {KEY}"}
        async with (
            running(command, environment, log) as child,
            aiohttp.ClientSession(target.base_url, headers=headers) as session,
        ):
            await ready(session, child, log)
            yield Served(target, log, session)
