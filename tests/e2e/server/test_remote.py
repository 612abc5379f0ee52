"""Workers on other machines, step by step as docs/operations.md has it, over 127.0.0.x."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from hearth.commands.make_keys import make_keys
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import models_of
from hearth.proxy.workers.remote_workers import UNKNOWN, RemoteWorkers
from hearth.shared.settings_from_env import PROJECT_DIR, load_settings
from hearth.shared.zmq_transport import SILENCE_S_MAX
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import WAIT_S_MAX, Server
from tests.helpers.servers.worker_command import WorkerCommand

WORDS = " ".join(f"word{number}" for number in range(200))
HEARD_S_MAX = SILENCE_S_MAX / 2  # until a client hears of a worker's death
MODEL = {"MODEL_PATH": str(fixture_dir("qwen3")), "PROXY_MODEL_ID": "local"}


def carried(keys: Path, to: Path, *names: str) -> Path:
    """Carry these key files, and no other, to another machine."""
    to.mkdir(mode=0o700)
    for name in names:
        shutil.copy2(keys / name, to / name)
    return to


class Fleet:
    """A proxy without workers of its own, and two workers with an address and a home each."""

    def __init__(self, directory: Path) -> None:
        keys = directory / "keys"
        made = [sys.executable, "-P", "-m", "hearth.commands.main", "keys", str(keys)]
        subprocess.run(made, cwd=PROJECT_DIR, check=True, stdout=subprocess.DEVNULL)
        worker_keys = carried(keys, directory / "w", "worker.key_secret", "proxy.key")
        self.proxy_keys = carried(keys, directory / "p", "proxy.key_secret", "worker.key")
        addresses = ("127.0.0.2", "127.0.0.3")
        self.workers = [WorkerCommand(worker_keys, each, **MODEL) for each in addresses]
        self.proxy = Server(
            **MODEL,
            WORKERS="0",
            WORKER_ENDPOINTS=",".join(worker.endpoint for worker in self.workers),
            CURVE_KEYS_DIR=str(self.proxy_keys),
        )

    def rows(self) -> list[dict[str, Any]]:
        return list(self.proxy.health().get("workers", []))

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not condition():
            logs = (self.proxy.log, *(worker.log for worker in self.workers))
            assert time.monotonic() < deadline, [each.read_text() for each in logs]
            time.sleep(0.02)

    def until_all_are_ready(self) -> None:
        self.until(lambda: {row["state"] for row in self.rows()} == {"ready"})

    def has_written(self) -> bool:
        """Tell whether no worker's KV waits to be written."""
        rows = self.proxy.get("/v1/cache")["workers"]
        return not any(row["disk"]["queue_bytes"] for row in rows)

    def served(self) -> list[int]:
        """How many requests each worker has finished."""
        return [worker.log.read_text().count("finished request=") for worker in self.workers]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    with made.workers[0], made.workers[1], made.proxy:
        yield made


class Talk:
    """A conversation of one session, which grows by a question and its answer a turn."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.messages = [{"role": "system", "content": name}]
        self.prompt_tokens = 0
        fleet.until_all_are_ready()
        before = fleet.served()
        self.turn(WORDS)
        fleet.until(lambda: sum(fleet.served()) > sum(before))
        self.own = next(n for n, served in enumerate(fleet.served()) if served > before[n])
        self.worker = fleet.workers[self.own]  # that has it

    def turn(self, words: str) -> int:
        """Return how many tokens had to be read beyond those that are new in the prompt."""
        self.messages.append({"role": "user", "content": words})
        with self.fleet.proxy.openai() as client:
            answer = client.chat.completions.create(
                model="local", messages=self.messages, max_tokens=4, temperature=0
            )
        said = answer.choices[0].message.content or ""
        self.messages.append({"role": "assistant", "content": said})
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        before, self.prompt_tokens = self.prompt_tokens, answer.usage.prompt_tokens
        read = self.prompt_tokens - (answer.usage.prompt_tokens_details.cached_tokens or 0)
        return max(0, read - (self.prompt_tokens - before))

    def listen(self, is_heard: threading.Event) -> tuple[float, str]:
        """Have a long answer; return when and with which words its stream broke off."""
        asked = [*self.messages, {"role": "user", "content": "Tell me all."}]
        with self.fleet.proxy.openai() as client:
            try:
                for _ in client.chat.completions.create(
                    model="local", messages=asked, max_tokens=50_000, temperature=0, stream=True
                ):
                    is_heard.set()
            except openai.APIError as error:
                return time.monotonic(), error.message
        raise AssertionError("the answer came to its end")

    def die(self, pid: int) -> None:
        """Kill `pid` amid an answer of this session, whose client must hear of it."""
        is_heard = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            broken = pool.submit(self.listen, is_heard)
            assert is_heard.wait(WAIT_S_MAX)
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            told_at, words = broken.result(WAIT_S_MAX)
        assert "worker" in words and "is gone" in words and "again" in words
        assert told_at - killed_at < HEARD_S_MAX
        self.fleet.until(lambda: self.fleet.rows()[self.own]["restarts"] >= 1)


def test_a_session_goes_on_at_its_worker_whose_process_was_killed_amid_an_answer(
    fleet: Fleet,
) -> None:
    talk = Talk(fleet, "a")
    assert talk.turn("And then?") == 0
    (pid,) = talk.worker.worker_pids
    talk.die(pid)
    fleet.until_all_are_ready()
    served = fleet.served()[talk.own]
    assert talk.turn("And then?") == 0, "all that was computed is on the worker's disk"
    fleet.until(lambda: fleet.served()[talk.own] == served + 1)


def test_a_session_goes_on_after_all_of_its_worker_was_killed_and_started_again(
    fleet: Fleet,
) -> None:
    talk = Talk(fleet, "b")
    assert talk.turn("And then?") == 0
    fleet.until(fleet.has_written)  # a kill loses what waits to be written, and no more
    (pid,) = talk.worker.worker_pids
    assert talk.worker.stop(signal.SIGKILL) == -signal.SIGKILL
    talk.worker.start()
    fleet.until(lambda: pid not in talk.worker.worker_pids)  # it ended by itself
    fleet.until(lambda: fleet.rows()[talk.own]["restarts"] >= 1)
    fleet.until_all_are_ready()
    assert talk.turn("And then?") == 0


def test_a_second_proxy_is_served_beside_the_first_and_a_stranger_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    make_keys(tmp_path / "strange")
    talk = Talk(fleet, "c")

    async def meets(keys: Path) -> tuple[str, str]:
        """Return what a proxy with `keys` says of the worker once it has met it."""
        environ = {"WORKER_ENDPOINTS": talk.worker.endpoint, "CURVE_KEYS_DIR": str(keys)}
        settings = load_settings({**MODEL, **environ, "WORKERS": "0"}, None)
        pool = WorkerPool()
        remote = RemoteWorkers(settings, pool, models_of(settings))
        (worker,) = remote.workers
        remote.start()
        async with asyncio.timeout(WAIT_S_MAX):
            while worker.state != "ready" and worker.problem != UNKNOWN:
                await asyncio.sleep(0.02)
        if worker.state == "ready":  # the first one's session goes on meanwhile
            assert await asyncio.to_thread(talk.turn, "And then?") == 0
        met = worker.state, worker.row()["problem"] or ""
        remote.stop()
        pool.close()
        return met

    assert asyncio.run(meets(fleet.proxy_keys)) == ("ready", "")
    assert asyncio.run(meets(tmp_path / "strange")) == ("unreachable", UNKNOWN)
    assert talk.turn("And then?") == 0


def test_a_worker_that_is_stopped_leaves_nothing_and_a_new_proxy_finds_what_the_other_has(
    fleet: Fleet,
) -> None:
    talk = Talk(fleet, "d")
    other = fleet.workers[1 - talk.own]
    assert other.stop(signal.SIGINT) == 0
    assert list((other.directory / "run" / str(other.port)).iterdir()) == []
    fleet.until(lambda: "Nothing listens there" in (fleet.rows()[1 - talk.own]["problem"] or ""))
    assert talk.turn("And then?") == 0
    fleet.proxy.stop(signal.SIGKILL)
    fleet.proxy.start()
    fleet.until(lambda: "ready" in [row["state"] for row in fleet.rows()])
    assert talk.turn("And then?") == 0
