"""Workers on other machines, step by step as docs/operations.md has it, over 127.0.0.x."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.take_port import read_pid_file
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.processes import PID_FILE
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.counted_talk import NOTES, Talk
from tests.helpers.servers.leaving_clients import Leaving
from tests.helpers.servers.server import Server, until

MODEL = {"MODEL_PATH": str(fixture_dir("qwen3")), "PROXY_MODEL_ID": "local"}


def carried(keys: Path, to: Path, *names: str) -> str:
    """Carry these key files, and no other, to another machine."""
    to.mkdir(mode=0o700)
    for name in names:
        shutil.copy2(keys / name, to / name)
    return str(to)


class RemoteWorker(Server):
    """One `hearth worker` as its user starts it on another machine, with an address of its own."""

    def __init__(self, keys: str, address: str) -> None:
        super().__init__(**MODEL, CURVE_KEYS_DIR=keys)
        self.endpoint = f"tcp://{address}:{self.port}"

    def start(self, *_: str) -> None:
        super().start("-P", "-m", "hearth.commands.main", "worker", self.endpoint)

    @property
    def worker_pid(self) -> int:
        """The process that computes, as the pid file names it; 0 while there is none."""
        _, children = read_pid_file(self.run_dir / "run" / str(self.port) / PID_FILE)
        return next((child.pid for child in children if child.is_running), 0)

    @property
    def served(self) -> int:
        return self.log.read_text().count("finished request=")


class Fleet:
    """A proxy without workers of its own, and two workers."""

    def __init__(self, directory: Path) -> None:
        keys = directory / "keys"
        made = [sys.executable, "-P", "-m", "hearth.commands.main", "keys", str(keys)]
        subprocess.run(made, cwd=PROJECT_DIR, check=True, stdout=subprocess.DEVNULL)
        of_worker = carried(keys, directory / "w", "worker.key_secret", "proxy.key")
        of_proxy = carried(keys, directory / "p", "proxy.key_secret", "worker.key")
        self.workers = [RemoteWorker(of_worker, f"127.0.0.{last}") for last in (2, 3)]
        endpoints = ",".join(worker.endpoint for worker in self.workers)
        remote = {"WORKERS": "0", "WORKER_ENDPOINTS": endpoints, "CURVE_KEYS_DIR": of_proxy}
        self.proxy = Server(**MODEL, **remote)

    def rows(self) -> list[dict[str, Any]]:
        return list(self.proxy.health().get("workers", []))

    def until_all_are_ready(self) -> None:
        until(lambda: [row["state"] for row in self.rows()] == ["ready", "ready"])

    def has_written(self) -> bool:
        """Tell whether no worker's KV waits to be written."""
        rows = self.proxy.get("/v1/cache")["workers"]
        return not any(row["disk"]["queue_bytes"] for row in rows)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    for each in (*made.workers, made.proxy):
        each.start()
    yield made
    for each in (made.proxy, *made.workers):
        each.__exit__()


def own_worker(fleet: Fleet, talk: Talk) -> int:
    """Begin a conversation; return the number of the worker that has it."""
    fleet.until_all_are_ready()
    before = [worker.served for worker in fleet.workers]
    talk.say(NOTES)
    until(lambda: [worker.served for worker in fleet.workers] != before)
    return next(n for n, worker in enumerate(fleet.workers) if worker.served > before[n])


def read_again(talk: Talk) -> int:
    """Ask on; return how many tokens of the prompt before had to be read once more."""
    before = talk.cached + talk.prefilled
    talk.say("And then?")
    return before - min(before, talk.cached)


def broken_off(fleet: Fleet, talk: Talk, pid: int) -> str:
    """Kill `pid` amid an answer of this session; return what its client hears."""
    body = talk.body("Tell me all.") | {"max_tokens": 50_000, "stream": True}
    client = Leaving(fleet.proxy, "/v1/chat/completions", body)
    client.read_some()
    os.kill(pid, signal.SIGKILL)
    return client.read_all().decode()


def test_a_session_goes_on_at_its_worker_whatever_was_killed_of_it(fleet: Fleet) -> None:
    talk = Talk(fleet.proxy)
    own = own_worker(fleet, talk)
    worker = fleet.workers[own]
    assert read_again(talk) == 0
    until(fleet.has_written)  # a kill loses what waits to be written, and no more
    told = broken_off(fleet, talk, worker.worker_pid)
    assert "worker" in told and "is gone" in told and "again" in told
    until(lambda: fleet.rows()[own]["restarts"] >= 1)
    fleet.until_all_are_ready()
    served = worker.served
    assert read_again(talk) == 0, "all that was computed is on the worker's disk"
    until(lambda: worker.served == served + 1)
    until(fleet.has_written)
    pid, restarts = worker.worker_pid, fleet.rows()[own]["restarts"]
    worker.stop(signal.SIGKILL)
    worker.start()
    until(lambda: worker.worker_pid not in (0, pid))  # it ended by itself
    until(lambda: fleet.rows()[own]["restarts"] > restarts)
    fleet.until_all_are_ready()
    assert read_again(talk) == 0


def test_a_worker_that_is_stopped_leaves_nothing_and_a_new_proxy_finds_what_the_other_has(
    fleet: Fleet,
) -> None:
    talk = Talk(fleet.proxy, date="2026-11-23")
    own = own_worker(fleet, talk)
    other = fleet.workers[1 - own]
    other.stop(signal.SIGINT)
    assert other.process is not None and other.process.returncode == 0
    assert list((other.run_dir / "run" / str(other.port)).iterdir()) == []
    until(lambda: "Nothing listens there" in (fleet.rows()[1 - own]["problem"] or ""))
    fleet.proxy.stop(signal.SIGKILL)
    fleet.proxy.start()
    until(lambda: "ready" in [row["state"] for row in fleet.rows()])
    assert read_again(talk) == 0
