"""Workers on other machines, step by step as docs/operations.md has it, over 127.0.0.x."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import WAIT_S_MAX, Server
from tests.helpers.servers.worker_command import WorkerCommand

Messages = list[dict[str, str]]
WORDS = " ".join(f"word{number}" for number in range(200))
HEARD_S_MAX = 2.0  # until a client hears of a worker's death


def hearth_keys(directory: Path) -> None:
    """Make keys as the user does: by the command."""
    subprocess.run(
        [sys.executable, "-P", "-m", "hearth.commands.main", "keys", str(directory)],
        cwd=PROJECT_DIR,
        check=True,
        stdout=subprocess.DEVNULL,
    )


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
        hearth_keys(keys)
        self.worker_keys = carried(keys, directory / "w", "worker.key_secret", "proxy.key")
        self.proxy_keys = carried(keys, directory / "p", "proxy.key_secret", "worker.key")
        model = {"MODEL_PATH": str(fixture_dir("qwen3")), "PROXY_MODEL_ID": "local"}
        self.workers = [
            WorkerCommand(self.worker_keys, f"127.0.0.{2 + number}", **model) for number in range(2)
        ]
        endpoints = ",".join(worker.endpoint for worker in self.workers)
        self.proxy = Server(
            **model, WORKERS="0", WORKER_ENDPOINTS=endpoints, CURVE_KEYS_DIR=str(self.proxy_keys)
        )

    def rows(self) -> list[dict[str, Any]]:
        return list(self.proxy.health().get("workers", []))

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not condition():
            logs = (self.proxy.log, *(worker.log for worker in self.workers))
            assert time.monotonic() < deadline, [each.read_text() for each in logs]
            time.sleep(0.02)

    def until_all(self, state: str) -> None:
        self.until(lambda: {row["state"] for row in self.rows()} == {state})

    def holder(self) -> int:
        """Which worker the last request went to: the one that has computed most."""
        steps = [row["steps"] for row in self.rows()]
        return steps.index(max(steps))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    with made.workers[0], made.workers[1], made.proxy:
        made.until_all("ready")
        yield made


class Talk:
    """A conversation that grows by a question and its answer a turn."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.messages: Messages = []

    def turn(self, words: str) -> tuple[int, int]:
        """Return the tokens of its prompt, and how many of them had to be read."""
        self.messages.append({"role": "user", "content": words})
        with self.fleet.proxy.openai() as client:
            answer = client.chat.completions.create(
                model="local", messages=self.messages, max_tokens=4, temperature=0
            )
        self.messages.append(
            {"role": "assistant", "content": answer.choices[0].message.content or ""}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        prompt = answer.usage.prompt_tokens
        return prompt, prompt - (answer.usage.prompt_tokens_details.cached_tokens or 0)


def test_a_session_goes_on_at_its_worker_over_every_kind_of_death(fleet: Fleet) -> None:
    talk = Talk(fleet)
    whole, read = talk.turn(WORDS)
    assert whole == read > 150
    asked, read = talk.turn("And then?")
    own = fleet.holder()
    worker = fleet.workers[own]
    a_turn = asked - whole  # an answer, which is known, and a question
    assert read <= a_turn

    print("KILL")
    (pid,) = worker.worker_pids
    os.kill(pid, signal.SIGKILL)
    fleet.until(lambda: fleet.rows()[own]["restarts"] == 1)
    fleet.until_all("ready")
    print(talk.turn("And then?"), fleet.holder())
    print(fleet.rows())
