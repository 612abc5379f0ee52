"""Measures what it takes a session to move to a worker that shares no directory with its first one.

Two real workers on tcp:// with CURVE keys and directories of their own, between them the proxy's
pool and relay. One reads a prompt; its next turn goes to the other, which fetches the KV and reads
the rest, and then reads all of it anew, uncached. A worker moves nothing that it would read sooner:
rounds that it read anew are counted, and have no ratio.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hearth.commands.make_keys import make_keys
from hearth.proxy.api import chat_completions
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.shared.kv_move_messages import Holds, KVMove
from hearth.shared.openblas_preload import openblas_environment
from hearth.shared.settings_from_env import example_lines
from hearth.shared.wire_messages import Finished, Speaker, Usage, encode
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, curve_keys, ipc_endpoint
from scripts.bench.servers import PROJECT_DIR, free_port
from scripts.fixtures.fixture_cache import fixture_dir

ABOUT: Final = "a session that moves between machines: bytes, seconds against reading it anew"
WAIT_S_MAX: Final = 120.0
Messages = list[dict[str, str]]


class Site:
    """Two workers, each on a machine of its own as far as it can see."""

    def __init__(self, directory: Path, model: Path) -> None:
        make_keys(directory / "keys")
        self._keys = curve_keys(directory / "keys", PROXY_NAME, WORKER_NAME)
        self._endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.processes = [
            _start(number, directory, model, endpoint)
            for number, endpoint in enumerate(self._endpoints)
        ]
        self._asked = 0

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[WorkerPool]:
        """Give a proxy's pool that is connected to both, once they are ready."""
        made = WorkerPool(is_apart=True, moves_kv=True)
        for number, endpoint in enumerate(self._endpoints):
            made.connect(number, endpoint, self._keys)
        try:
            await until(lambda: all(link.is_ready for link in made.links.values()))
            yield made
        finally:
            made.close()

    async def ask(
        self, link: WorkerLink, messages: Messages, key: str = "mine", use_kv_cache: bool = True
    ) -> tuple[str, Usage]:
        """Return a worker's answer, and what it cost."""
        self._asked += 1
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12}
        request = chat_completions.parse(body)
        prompt = replace(request.prompt, speaker=Speaker(key))
        request = replace(request, prompt=prompt, use_kv_cache=use_kv_cache)
        answer = link.submit(request, f"r{self._asked}")
        texts = []
        while not isinstance(event := await answer.next_event(), Finished):
            assert event is not None
            texts.append(event.text)
        return "".join(texts), event.usage

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def _start(number: int, directory: Path, model: Path, endpoint: str) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        **openblas_environment(os.environ),
        **dict(line.split("=", 1) for line in example_lines()[1::2]),
        "MODEL_PATH": str(model),
        "PROXY_MODEL_ID": "local",
        "CURVE_KEYS_DIR": str(directory / "keys"),
        "RUN_DIR": str(directory / f"run{number}"),
        "LOG_ROOT": str(directory / "logs"),
        "KV_CACHE_DIR": str(directory / f"kv{number}"),
        "DOCTOR": "off",
    }
    own = ipc_endpoint(directory / f"s{number}")  # a supervisor's, which it has none of here
    command = ["-m", "hearth.worker.main", "--worker-id", str(number), "--endpoint", own]
    with (directory / f"log{number}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command, "--listen", endpoint],
            cwd=PROJECT_DIR,
            env=environment,
            stdin=subprocess.PIPE,  # its end would tell the worker to end
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` holds. Raises: TimeoutError."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not condition():
            await asyncio.sleep(0.02)


def first_turn(seed: int, words: int) -> Messages:
    said = f"{seed} " + " ".join(f"word{number}" for number in range(words))
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": said}]


def next_turn(first: Messages, said: str) -> Messages:
    answer = {"role": "assistant", "content": said}
    return [*first, answer, {"role": "user", "content": "And now?"}]


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixture", default="qwen3")
    parser.add_argument("--words", default="500,2000,4000", help="of a prompt; four tokens each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        site = Site(Path(directory), fixture_dir(options.fixture))
        try:
            lengths = [int(words) for words in options.words.split(",")]
            rows = asyncio.run(_measure(site, lengths, options.rounds))
        finally:
            site.stop()
    text = json.dumps({"fixture": options.fixture, "rows": rows}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


async def _measure(site: Site, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    async with site.pool() as pool:
        await site.ask(pool.links[0], first_turn(1, 20), use_kv_cache=False)  # kernels are made
        await site.ask(pool.links[1], first_turn(1, 20), use_kv_cache=False)
        rows = []
        for words in lengths:
            played = [await _play(site, pool, 1000 * words + n, words) for n in range(rounds)]
            rows.append({"words": words} | _medians(played))
        return rows


async def _play(site: Site, pool: WorkerPool, seed: int, words: int) -> dict[str, Any]:
    """Have one session move; return what that took, and what reading it anew takes there."""
    one, two = pool.links[0], pool.links[1]
    told = list[Holds]()

    def hear(worker_id: int, message: KVMove) -> None:
        told.extend([message] if isinstance(message, Holds) else [])
        pool.relay.hear(worker_id, message)

    one.hear_kv = hear
    first = first_turn(seed, words)
    said, _ = await site.ask(one, first)
    await until(lambda: told)
    before = pool.relay.counts["bytes"]
    turn = next_turn(first, said)
    answer, moved = await site.ask(two, turn)
    cold_answer, cold = await site.ask(two, turn, use_kv_cache=False)
    return {
        "prompt_tokens": moved.prompt_tokens,
        "moved_tokens": moved.cached_tokens,
        "bytes": pool.relay.counts["bytes"] - before,
        "moved_ms": moved.ttft_ms,
        "anew_ms": cold.ttft_ms,
        "told_bytes": sum(len(encode(each)) for each in told),
        "is_equal": answer == cold_answer,
    }


def _medians(played: list[dict[str, Any]]) -> dict[str, Any]:
    moved = [row for row in played if row["moved_tokens"]]
    figures = {
        name: statistics.median(row[name] for row in moved)
        for name in ("prompt_tokens", "moved_tokens", "bytes", "moved_ms", "anew_ms", "told_bytes")
        if moved
    }
    return figures | {
        "rounds": len(played),
        "moved": len(moved),
        "equal": sum(row["is_equal"] for row in played),
        "ratio": statistics.median(row["moved_ms"] / row["anew_ms"] for row in moved)
        if moved
        else None,
    }
