"""Two real workers with directories of their own, on tcp:// with CURVE keys: a session moves."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.commands.make_keys import make_keys
from hearth.proxy.api import chat_completions
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.shared.kv_move_messages import Found, Holds, KVMove
from hearth.shared.settings_from_env import PROJECT_DIR, example_lines
from hearth.shared.wire_messages import Speaker, Usage
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, curve_keys
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.proxy.fake_worker_pool import read
from tests.helpers.servers.server import free_port

WAIT_S = 120.0
Answered = tuple[str, Usage]
Process = subprocess.Popen[bytes]


def worker(number: int, directory: Path, endpoint: str) -> Process:
    environment = {
        **os.environ,
        **dict(line.split("=", 1) for line in example_lines()[1::2]),
        "MODEL_PATH": str(fixture_dir("qwen3", tiny=True)),
        "PROXY_MODEL_ID": "local",
        "CURVE_KEYS_DIR": str(directory / "keys"),
        "RUN_DIR": str(directory / f"run{number}"),
        "LOG_ROOT": str(directory / "logs"),
        "KV_CACHE_DIR": str(directory / f"kv{number}"),
        "DOCTOR": "off",
    }
    command = ["-m", "hearth.worker.main", "--worker-id", str(number), "--endpoint", endpoint]
    with (directory / f"log{number}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=PROJECT_DIR,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


class Site:
    """Two workers, each on a machine of its own as far as it can see, and their proxy's pool."""

    def __init__(self, directory: Path) -> None:
        make_keys(directory / "keys")
        self._keys = curve_keys(directory / "keys", PROXY_NAME, WORKER_NAME)
        self._endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.processes = [worker(n, directory, at) for n, at in enumerate(self._endpoints)]
        self.asked = 0

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[WorkerPool]:
        made = WorkerPool(is_apart=True, moves_kv=True)
        for number, endpoint in enumerate(self._endpoints):
            made.connect(number, endpoint, self._keys)
        try:
            await until(lambda: all(link.is_ready for link in made.links.values()))
            yield made
        finally:
            made.close()

    async def ask(
        self, link: WorkerLink, messages: list[dict[str, str]], key: str, use_kv_cache: bool = True
    ) -> Answered:
        self.asked += 1
        request = chat_completions.parse(
            {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12}
        )
        prompt = replace(request.prompt, speaker=Speaker(key))
        request = replace(request, prompt=prompt, use_kv_cache=use_kv_cache)
        answer = link.submit(request, f"r{self.asked}")
        text, finished = await read(answer)
        return text, finished.usage

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.stop()


def talk(seed: int) -> list[dict[str, str]]:
    words = " ".join(f"word{number * seed}" for number in range(300))
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]


def test_a_session_goes_on_at_another_machine_and_a_holder_that_dies_costs_a_prefill(
    site: Site,
) -> None:
    async def play() -> None:
        async with site.pool() as pool:
            one, two = pool.links[0], pool.links[1]
            said, first = await site.ask(one, talk(1), "mine")
            await until(lambda: pool.relay.report()["held"] > 0)
            longer = [
                *talk(1),
                {"role": "assistant", "content": said},
                {"role": "user", "content": "And now?"},
            ]
            moved, usage = await site.ask(two, longer, "mine")
            assert usage.cached_tokens > first.prompt_tokens - 20 and usage.source == "ssd"
            brought = pool.relay.report()["bytes"]
            assert brought > 50 * usage.cached_tokens
            _, theirs = await site.ask(two, longer, "theirs")
            assert theirs.cached_tokens == 0 and pool.relay.report()["bytes"] == brought
            cold, uncached = await site.ask(one, longer, "mine", use_kv_cache=False)
            assert (moved, uncached.cached_tokens) == (cold, 0)

            told = list[Holds]()

            def dies(worker_id: int, message: KVMove) -> None:
                if isinstance(message, Found):
                    site.processes[0].kill()
                    pool.disconnect(0, "is gone")
                    return
                told.extend([message] if isinstance(message, Holds) else [])
                pool.relay.hear(worker_id, message)

            one.hear_kv = dies
            await site.ask(one, talk(7), "mine")
            await until(lambda: told)
            _, alone = await site.ask(two, talk(7), "mine")
            assert site.processes[0].wait(WAIT_S) and alone.cached_tokens < 50
            assert pool.relay.report()["lost"] >= 1

    asyncio.run(play())
