"""Each request to the worker that embeds ends in one answer, whatever becomes of the worker."""

import asyncio
import os
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.proxy.embeddings import encoders as module
from hearth.proxy.embeddings.encoders import REPLAYS_MAX, Encoders, make_encoders
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.shared.errors import RequestError, StartError
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import Embedded
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint

pytestmark = pytest.mark.process
SCRIPTED: Final = (sys.executable, "-m", "tests.helpers.worker_processes.scripted_embedder")
WAIT_S_MAX: Final = 60.0


class Notes:
    """What the scripted worker noted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    @property
    def starts(self) -> int:
        return sum(line.startswith("start ") for line in self.lines)

    async def wait_for(self, *lines: str) -> None:
        await until(lambda: set(lines) <= set(self.lines))


async def until(is_true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_true():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


@asynccontextmanager
async def running(
    notes: Notes,
    is_busy: Callable[[], bool] = lambda: False,
    settings: dict[str, str] | None = None,
    **environ: str,
) -> AsyncIterator[Encoders]:
    """Give what asks a worker, for WAIT_S_MAX, and close it."""
    told = {"EMBEDDING_MODEL": "org/x", "RUN_DIR": str(notes.path.parent), **(settings or {})}
    environment = {**os.environ, "NOTES": str(notes.path), **environ}
    encoders = Encoders(load_settings(told, None), environment, is_busy, SCRIPTED)
    await encoders.supervisor.start()
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            yield encoders
    finally:
        await encoders.close()
    assert encoders.worker.pid is None and encoders.waiting == 0


def pid_of(found: Embedded) -> float:
    return float(struct.unpack_from("<2f", found.vectors)[1])


@contextmanager
def refused(code: str, text: str = "") -> Iterator[None]:
    with pytest.raises(RequestError, match=text or None) as error:
        yield
    assert (error.value.code, error.value.status) == (code, 503)


async def test_the_first_request_starts_the_worker_and_others_find_it(notes: Notes) -> None:
    async with running(notes) as encoders:
        assert encoders.state == "unloaded" and not notes.lines
        found = await asyncio.gather(*(encoders.embed(["abc", "d"]) for _ in range(9)))
        assert [each.tokens for each in found] == [[3, 1]] * 9
        assert found[0].dimensions == 2 and len({pid_of(each) for each in found}) == 1
        assert encoders.state == "ready" and encoders.worker.starts == 1
        assert encoders.facts["embeddings"].architecture == "scripted"
    assert notes.lines[0] == "start org/x"
    assert notes.starts == 1 and notes.lines[-1] == "end", "it was not killed"


async def test_a_request_that_kills_the_worker_is_told_and_the_others_are_computed(
    notes: Notes,
) -> None:
    async with running(notes) as encoders:
        waiting = [asyncio.create_task(encoders.embed(["wait"])) for _ in range(2)]
        await until(lambda: notes.lines.count("wait False") == 2)
        with refused("embedding_process_died", "SIGKILL"):
            await encoders.embed(["kill"])
        assert pid_of(await encoders.embed(["good"])) > 0
        assert not any(task.done() for task in waiting), "they are asked of the next process"
        await until(lambda: notes.lines.count("wait False") == 4)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (encoders.worker.restarts, encoders.worker.starts) == (1, 2)


async def test_a_request_is_not_asked_for_ever_of_workers_that_others_kill(notes: Notes) -> None:
    async with running(notes) as encoders:
        innocent = asyncio.create_task(encoders.embed(["wait"]))
        for count in range(1, REPLAYS_MAX + 2):
            await until(lambda count=count: notes.lines.count("wait False") == count)
            with refused("embedding_process_died"):
                await encoders.embed(["kill"])
        with refused("worker_unavailable"):
            await innocent


async def test_a_worker_that_stands_still_is_killed_and_its_request_is_told(notes: Notes) -> None:
    async with running(notes, settings={"STALL_SECONDS": "1"}) as encoders:
        await encoders.embed(["good"])
        with refused("embedding_process_died", "made no step for"):
            await encoders.embed(["hang"])


async def test_a_client_that_leaves_has_its_request_cancelled(notes: Notes) -> None:
    async with running(notes) as encoders:
        leaving = asyncio.create_task(encoders.embed(["wait"], None, True))
        await notes.wait_for("wait True")
        leaving.cancel()
        await notes.wait_for("Cancel()")
        assert encoders.waiting == 0


async def test_an_idle_worker_ends_and_the_next_request_starts_another(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.2)

    async with running(notes) as encoders:
        first = pid_of(await encoders.embed(["a"]))
        assert pid_of(await encoders.embed(["a"])) == first
        await until(lambda: encoders.state == "unloaded" and encoders.worker.pid is None)
        assert notes.lines[-1] == "end"
        assert pid_of(await encoders.embed(["a"])) != first
        assert encoders.worker.restarts == 0


async def test_what_no_frame_can_hold_is_refused_to_its_client_alone(notes: Notes) -> None:
    async with running(notes) as encoders:
        with pytest.raises(RequestError, match="cannot be carried") as error:
            await encoders.embed(["\ud800"])
        assert error.value.status == 400
        assert (await encoders.embed(["a"])).tokens == [1]


async def test_the_worker_is_told_when_answers_stream_beside_it_and_when_no_more(
    notes: Notes,
) -> None:
    is_busy = True

    async with running(notes, lambda: is_busy) as encoders:
        waiting = asyncio.create_task(encoders.embed(["wait"]))
        await notes.wait_for("ShortTurns(True)")
        is_busy = False
        await notes.wait_for("ShortTurns(False)")
        is_busy = True
        with refused("embedding_process_died"):
            await encoders.embed(["kill"])
        await until(lambda: "ShortTurns(True)" in notes.lines[notes.lines.index("kill False") :])
        assert notes.starts == 2, "the new one is told too"
        waiting.cancel()


async def test_a_request_that_comes_as_the_worker_starts_or_ends_is_answered(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 1e-6)
    monkeypatch.setattr(module, "PACE_S", 0.001)

    async with running(notes) as encoders:
        leaving = asyncio.create_task(encoders.embed(["a"]))
        await until(lambda: encoders.state == "loading")
        leaving.cancel()
        for wait_s in (0.0, 0.001, 0.003, 0.01, 0.05):
            assert (await encoders.embed(["a"])).tokens == [1]
            await asyncio.sleep(wait_s)


@pytest.mark.parametrize(("why", "text"), [("no such file", "no such file"), ("", "exit code 78")])
async def test_models_that_cannot_be_loaded_are_told_at_once_and_tried_again_later(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, why: str, text: str
) -> None:
    async with running(notes, CANNOT_LOAD=why) as encoders:
        for _ in range(2):
            with refused("embeddings_unavailable", text):
                await encoders.embed(["a"])
        assert notes.starts == 1 and encoders.state == "unloaded"
        monkeypatch.setattr(module, "FAILED_REST_S", 0.0)
        with refused("embeddings_unavailable", text):
            await encoders.embed(["a"])
        assert notes.starts == 2


@pytest.mark.parametrize("text", ["wait", "hang"])
async def test_who_waits_as_the_server_stops_is_told_and_nothing_is_left(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    async with running(notes) as encoders:
        waiting = asyncio.create_task(encoders.embed([text]))
        await notes.wait_for(f"{text} False")
        pid = encoders.worker.pid
        await encoders.close()
        assert pid is not None and not Path(f"/proc/{pid}").exists()
        for asked in (waiting, encoders.embed(["a"])):
            with refused("stopping"):
                await asked


# ---------------------------------------------------------------- settings


def test_without_either_model_there_is_no_worker() -> None:
    assert make_encoders(load_settings({}, None), {}, WorkerPool()) is None


@pytest.mark.parametrize("setting", ["EMBEDDING_MODEL", "RERANK_MODEL"])
def test_a_model_makes_a_worker_that_has_not_begun_and_no_model_refuses_to_start(
    setting: str, tmp_path: Path
) -> None:
    found = {setting: str(embedding_checkpoint("bert")), "RUN_DIR": str(tmp_path / "run")}
    encoders = make_encoders(load_settings(found, None), {}, WorkerPool())
    assert encoders is not None
    assert (encoders.state, encoders.worker.pid) == ("unloaded", None)
    (tmp_path / "config.json").write_text("{}")
    for source in ("/does/not/exist", "no-such-name", str(tmp_path), str(tmp_path.parent)):
        settings = load_settings({setting: source}, None)
        with pytest.raises(StartError, match=f"^{setting} is '{source}'"):
            make_encoders(settings, {}, WorkerPool())
