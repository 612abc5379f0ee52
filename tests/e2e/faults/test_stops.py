"""Stops amid a chunk: the chunk ends, the device is left, and then the process exits."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hearth.shared.errors import EXIT_STUCK
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Admitted,
    Delta,
    Failed,
    Heartbeat,
    Hello,
    Progress,
    Prompt,
    Renew,
    Sampling,
    Submit,
    Up,
    decode,
)
from hearth.shared.zmq_transport import DealerLink, ipc_endpoint
from hearth.worker.disk.file_format import FileKind, parse
from scripts.fixtures.fixture_cache import fixture_dir, mlx_environment
from tests.helpers.servers.server import READY_S_MAX, WAIT_S_MAX, Server, until

CHUNK = 64
CHUNK_S = 1.5  # longer than a stop waits before it says so
WORDS = " ".join(f"word{number}" for number in range(4 * CHUNK))
SLOW_WORKER = "tests.helpers.worker_processes.slow_worker"
LAUNCH = f"""
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", {SLOW_WORKER!r}]))
"""


def settings(directory: Path, chunk_s: str) -> dict[str, str]:
    return {
        "MODEL_PATH": str(fixture_dir("qwen3", tiny=True)),
        "PREFILL_CHUNK": str(CHUNK),
        "KV_CACHE_DIR": str(directory / "kv"),
        "LOG_ROOT": str(directory / "logs"),
        "SLOW_CHUNK_S": chunk_s,
        "SLOW_LOG": str(directory / "events"),
    }


def events(directory: Path) -> list[str]:
    log = directory / "events"
    return log.read_text().splitlines() if log.exists() else []


def is_amid_a_chunk(directory: Path, number: int) -> bool:
    """Whether the chunk of this number has begun: what was before it is committed."""
    return sum(line.startswith("chunk begins") for line in events(directory)) >= number


def stored_tokens(directory: Path) -> int:
    names = [parse(path.name, "") for path in (directory / "kv").rglob("rows-*")]
    return sum(name.token_count for name in names if name and name.kind is FileKind.ROWS)


def assert_the_device_is_left(directory: Path, chunks: int = 2) -> None:
    """The chunk in flight was the last, and is on disk; then the device, memory, exit."""
    lines = events(directory)
    begun = [line.split()[2] for line in lines if line.startswith("chunk begins")]
    ended = [line.split()[2] for line in lines if line.startswith("chunk ends")]
    assert begun == ended and len(ended) == chunks, lines
    last = lines.index("handed over")
    assert lines[last - 1].startswith("chunk ends"), lines
    device = ["synchronized decoding", "synchronized", "wired 0"]
    assert list(dict.fromkeys(lines[last:])) == ["handed over", *device, "exit 0"], lines
    assert stored_tokens(directory) == sum(map(int, ended))


# ------------------------------------------------------------ the server


def test_ctrl_c_amid_a_chunk_kills_nothing_says_what_it_waits_for_and_keeps_the_chunk() -> None:
    server = Server()
    server.environment |= settings(server.run_dir, str(CHUNK_S))
    server.start("-c", LAUNCH)
    assert server.process is not None
    try:
        server.wait_until_ready()
        ends: list[str] = []
        client = threading.Thread(target=lambda: ends.append(ask(server)), daemon=True)
        client.start()
        until(lambda: ends or is_amid_a_chunk(server.run_dir, 2))
        assert not ends, ends
        for _ in range(2):  # a terminal and what was started in it may both pass it on
            os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(WAIT_S_MAX) == 0
        client.join(WAIT_S_MAX)
        assert len(ends) == 1 and "The server is shutting down." in ends[0]
        said = server.log.read_text()
        waiting = "waiting for worker 0 to end its chunk (up to 15 s); a second Ctrl-C kills it"
        assert said.count(waiting) == 1 and "killed" not in said, said
        assert_the_device_is_left(server.run_dir)
    finally:
        server.process.kill()
        server.__exit__()


def ask(server: Server) -> str:
    """Return what the client of a long prompt was told in the end."""
    body = {"model": "claude-x", "messages": [{"role": "user", "content": WORDS}], "stream": True}
    try:
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S_MAX).text
    except httpx.HTTPError as error:
        return repr(error)


# ------------------------------------------------------------ workers alone


class SlowWorker:
    """One worker that was told to end amid its second chunk, and what its proxy heard since."""

    def __init__(self, directory: Path, chunk_s: str, **environ: str) -> None:
        self.directory = directory
        self.endpoint = ipc_endpoint(directory / "w.sock")
        self.heard: list[Up] = []
        command = [sys.executable, "-m", SLOW_WORKER, "--worker-id", "0"]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--endpoint", self.endpoint],
                cwd=PROJECT_DIR,
                env={**mlx_environment(), **settings(directory, chunk_s), **environ},
                stdin=subprocess.PIPE,
                stderr=log,
            )

    async def end(self, number: int, with_signal: signal.Signals | None) -> None:
        """End it amid chunk `number`: by a signal, or as if its supervisor had died."""
        link = DealerLink(self.endpoint, self._hear)
        link.send(Hello(PROTOCOL_VERSION))
        await self._until(lambda: any(is_ready(message) for message in self.heard))
        prompt = Prompt([{"role": "user", "content": WORDS}])
        link.send(Submit("r", prompt, Sampling(max_tokens=4)))
        while not is_amid_a_chunk(self.directory, number):
            link.send(Renew(["r"]))
            await asyncio.sleep(0.05)
        if number > 1:  # what was told of the chunk before may be on its way yet
            await self._until(lambda: any(map(is_progress, self.heard)))
        self.heard.clear()
        if with_signal is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
        else:
            self.process.send_signal(with_signal)
            link.send(Submit("late", prompt, Sampling(max_tokens=4)))
        await self._until(lambda: self.process.poll() is not None)
        await asyncio.sleep(0.1)
        link.close()

    def _hear(self, frame: bytes) -> None:
        self.heard.append(decode(frame))  # type: ignore[arg-type]

    async def _until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(READY_S_MAX):
            while not condition():
                await asyncio.sleep(0.02)


def is_ready(message: Up) -> bool:
    return isinstance(message, Heartbeat) and message.state == "ready"


def is_progress(message: Up) -> bool:
    return isinstance(message, Progress) and message.done_tokens > 0


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SlowWorker]]:
    """Three workers that ended side by side."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("term", "alone", "hung")}
    made = {
        "term": SlowWorker(places["term"], str(CHUNK_S)),
        "alone": SlowWorker(places["alone"], str(CHUNK_S)),
        "hung": SlowWorker(places["hung"], "inf", SLOW_WAIT_S="0.3"),
    }

    async def end_all() -> None:
        await asyncio.gather(
            made["term"].end(2, signal.SIGTERM),
            made["alone"].end(2, None),
            made["hung"].end(1, signal.SIGTERM),
        )

    try:
        asyncio.run(end_all())
        yield made
    finally:
        for worker in made.values():
            worker.process.kill()
            worker.process.communicate()


def test_a_worker_that_is_told_to_end_leaves_the_device_and_tells_clients_before(
    workers: dict[str, SlowWorker],
) -> None:
    worker = workers["term"]
    assert worker.process.returncode == 0
    assert_the_device_is_left(worker.directory)
    about = [each for each in worker.heard if not isinstance(each, Heartbeat)]
    ends = [each for each in about if not isinstance(each, Admitted | Delta | Progress)]
    assert sorted(each.request_id for each in ends if isinstance(each, Failed)) == ["late", "r"]
    assert len(ends) == 2, "each has one end"
    last = {each.request_id: each for each in about if isinstance(each, Admitted | Failed)}
    assert all(isinstance(each, Failed) for each in last.values()), "nothing comes behind it"
    assert not [each for each in about if isinstance(each, Delta | Progress)]
    assert all(each.code == "overloaded" for each in ends if isinstance(each, Failed))
    since = worker.heard[worker.heard.index(ends[0]) :]
    assert any(isinstance(each, Heartbeat) for each in since), "it is not silent"


def test_a_worker_whose_supervisor_died_ends_its_chunk_too(workers: dict[str, SlowWorker]) -> None:
    assert workers["alone"].process.returncode == 0
    assert_the_device_is_left(workers["alone"].directory)


def test_a_chunk_that_never_ends_is_not_waited_for_without_limit(
    workers: dict[str, SlowWorker],
) -> None:
    worker = workers["hung"]
    assert worker.process.returncode == EXIT_STUCK
    assert "has not ended in 0.3 s: ended amid it" in (worker.directory / "log").read_text()
    assert "wired 0" not in events(worker.directory)
