"""Each request to the process that embeds ends in one answer, whatever becomes of the process."""

import asyncio
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.proxy.embeddings import embedding_process as module
from hearth.proxy.embeddings.embedding_process import (
    QUEUE_MAX,
    REPLAYS_MAX,
    EmbeddingProcess,
    Embeddings,
    EmbeddingSettings,
)
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.models import builtin_models
from hearth.shared.models.builtin_models import MODELS_DIR_VARIABLE

pytestmark = pytest.mark.process
SCRIPTED: Final = (sys.executable, "-m", "tests.helpers.worker_processes.scripted_embedder")
WAIT_S_MAX: Final = 60.0


class Notes:
    """What the scripted process noted."""

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


Talk = Callable[[EmbeddingProcess], Awaitable[None]]


def run(notes: Notes, talk: Talk, *, idle_s: float = 0, **environ: str) -> None:
    """Let `talk` use a process, and close that."""
    settings = EmbeddingSettings(
        "org/x", "", idle_s, {**os.environ, "NOTES": str(notes.path), **environ}
    )

    async def whole() -> None:
        process = EmbeddingProcess(settings, command=SCRIPTED)
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                await talk(process)
        finally:
            await process.close()
        assert process.pid is None and process.facts()["waiting"] == 0

    asyncio.run(whole())


def pid_of(found: Embeddings) -> float:
    return float(struct.unpack_from("<2f", found.vectors)[1])


@contextmanager
def refused(code: str, text: str = "") -> Iterator[None]:
    with pytest.raises(RequestError, match=text or None) as error:
        yield
    assert (error.value.code, error.value.status) == (code, 503)


def test_the_first_request_starts_the_process_and_others_find_it(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        assert process.facts()["state"] == "unloaded" and not notes.lines
        found = await asyncio.gather(*(process.embed(["abc", "d"]) for _ in range(9)))
        assert [each.tokens for each in found] == [[3, 1]] * 9
        assert found[0].dimensions == 2 and len({pid_of(each) for each in found}) == 1
        assert process.facts()["state"] == "ready"
        assert process.facts()["embedding"].architecture == "scripted"
        assert process.starts == 1

    run(notes, talk)
    assert notes.lines[0].endswith("--embedding-model org/x --rerank-model ")
    assert notes.starts == 1 and notes.lines[-1] == "end", "it was not killed"


def test_a_request_that_kills_the_process_is_told_and_the_others_are_computed(
    notes: Notes,
) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        waiting = [asyncio.create_task(process.embed(["wait"])) for _ in range(2)]
        await until(lambda: notes.lines.count("wait False") == 2)
        with refused("embedding_process_died", "SIGKILL"):
            await process.embed(["kill"])
        assert pid_of(await process.embed(["good"])) > 0
        assert not any(task.done() for task in waiting), "they are asked of the next process"
        assert notes.lines.count("wait False") == 4
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (process.deaths, process.starts) == (1, 2)

    run(notes, talk)


def test_a_process_that_is_told_to_end_while_it_is_started_ends(notes: Notes) -> None:
    async def close_at_once(process: EmbeddingProcess) -> None:
        asking = asyncio.create_task(process.embed(["a"]))
        await begin_to_start(process)
        await process.close()
        with refused("stopping"):
            await asking

    async def leave_at_once(process: EmbeddingProcess) -> None:
        asking = asyncio.create_task(process.embed(["a"]))
        await begin_to_start(process)
        asking.cancel()
        assert (await process.embed(["b"], truncate=True)).tokens == [1]

    async def begin_to_start(process: EmbeddingProcess) -> None:
        while process.facts()["state"] != "loading":
            await asyncio.sleep(0)
        assert process.pid is None, "the system is still starting it"

    run(notes, close_at_once)
    run(notes, leave_at_once, idle_s=1e-6)
    assert notes.lines.count("b True") >= 1


def test_a_request_is_not_asked_for_ever_of_processes_that_others_kill(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        innocent = asyncio.create_task(process.embed(["wait"]))
        await notes.wait_for("wait False")
        for _ in range(REPLAYS_MAX + 1):
            with refused("embedding_process_died"):
                await process.embed(["kill"])
        with refused("embedding_process_died"):
            await innocent

    run(notes, talk)


def test_what_the_process_says_wrongly_ends_it_and_the_next_one_answers(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        with refused("embedding_process_died", "no message of this version"):
            await process.embed(["garbage"])
        await process.embed(["good"])

    run(notes, talk)
    assert notes.starts == 2


def test_a_process_that_stands_still_is_killed(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_S_MAX", 0.3)

    async def talk(process: EmbeddingProcess) -> None:
        await process.embed(["good"])
        await asyncio.sleep(0.5)  # nobody waits: its silence is no fault
        assert process.pid is not None
        with refused("embedding_process_died", "it said nothing for"):
            await process.embed(["hang"])

    run(notes, talk)


def test_a_client_that_leaves_has_its_request_cancelled(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        leaving = asyncio.create_task(process.embed(["wait"], None, True))
        await notes.wait_for("wait True")
        leaving.cancel()
        await notes.wait_for("CancelJob(request_id=1)")
        assert process.facts()["waiting"] == 0

    run(notes, talk)


def test_an_idle_process_ends_and_the_next_request_starts_another(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        first = pid_of(await process.embed(["a"]))
        assert pid_of(await process.embed(["a"])) == first
        await until(lambda: process.facts()["state"] == "unloaded")
        assert process.pid is None and notes.lines[-1] == "end"
        assert pid_of(await process.embed(["a"])) != first
        assert process.deaths == 0

    run(notes, talk, idle_s=0.2)


def test_a_request_that_comes_as_the_idle_process_ends_is_answered(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        for _ in range(12):
            assert (await process.embed(["a"])).tokens == [1]
            await asyncio.sleep(0.02)

    run(notes, talk, idle_s=0.019)


@pytest.mark.parametrize(("why", "text"), [("no such file", "no such file"), ("", "exit code 78")])
def test_models_that_cannot_be_loaded_are_told_at_once_and_tried_again_later(
    notes: Notes, monkeypatch: pytest.MonkeyPatch, why: str, text: str
) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        with refused("embeddings_unavailable", text):
            await process.embed(["a"])
        with refused("embeddings_unavailable", text):
            await process.embed(["a"])
        assert notes.starts == 1 and text in process.facts()["why_failed"]
        monkeypatch.setattr(module, "FAILED_REST_S", 0.0)
        with refused("embeddings_unavailable", text):
            await process.embed(["a"])
        assert notes.starts == 2

    run(notes, talk, CANNOT_LOAD=why)


def test_a_program_that_cannot_be_started_is_told(notes: Notes) -> None:
    async def talk() -> None:
        process = EmbeddingProcess(EmbeddingSettings("org/x"), command=["/nowhere/python"])
        with refused("embeddings_unavailable", "starts no process"):
            await process.embed(["a"])
        await process.close()

    asyncio.run(talk())


def test_a_model_that_is_not_here_is_told_with_the_remedy_until_it_is_pulled(
    notes: Notes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_DIR_VARIABLE, str(tmp_path / "models"))
    monkeypatch.setattr(builtin_models, "local_models", list)
    directory = tmp_path / "models" / "minilm-0.1.2"
    settings = EmbeddingSettings("builtin:minilm", environ={**os.environ, "NOTES": str(notes.path)})

    async def talk() -> None:
        process = EmbeddingProcess(settings, command=SCRIPTED)
        for _ in range(2):
            with refused("embeddings_unavailable", "hearth pull minilm .* EMBEDDING_MODEL to an"):
                await process.embed(["a"])
        assert process.starts == 0, "nothing is started for what is not there"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        assert (await process.embed(["a"])).tokens == [1]
        await process.close()

    asyncio.run(talk())
    assert notes.lines[0].endswith(f"--embedding-model {directory} --rerank-model ")


def test_more_requests_than_the_queue_holds_are_refused_and_the_rest_answered(
    notes: Notes,
) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        asked = [asyncio.create_task(process.embed(["a"])) for _ in range(QUEUE_MAX + 3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refusals = [each for each in found if isinstance(each, Overloaded)]
        assert len(refusals) == 3 and str(QUEUE_MAX) in str(refusals[0])
        assert sum(isinstance(each, Embeddings) for each in found) == QUEUE_MAX

    run(notes, talk)


def test_the_process_is_told_when_answers_stream_beside_it_and_when_no_more(notes: Notes) -> None:
    is_busy = True
    settings = EmbeddingSettings("org/x", environ={**os.environ, "NOTES": str(notes.path)})

    async def talk() -> None:
        nonlocal is_busy
        process = EmbeddingProcess(settings, lambda: is_busy, SCRIPTED)
        waiting = asyncio.create_task(process.embed(["wait"]))
        await notes.wait_for("ShortTurns(are_wanted=True)")
        is_busy = False
        await notes.wait_for("ShortTurns(are_wanted=False)")
        waiting.cancel()
        is_busy = True
        with refused("embedding_process_died"):
            await process.embed(["kill"])
        again = asyncio.create_task(process.embed(["wait"]))
        await until(lambda: notes.lines[-1] == "ShortTurns(are_wanted=True)")
        assert notes.starts == 2 and "wait False" in notes.lines[-3:], "the new one is told too"
        again.cancel()
        await process.close()

    asyncio.run(talk())


def test_what_no_frame_can_hold_is_refused_to_its_client_alone(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        with pytest.raises(RequestError, match="cannot be sent") as error:
            await process.embed(["\ud800"])
        assert error.value.status == 400
        assert not notes.lines, "no process was started for it"

    run(notes, talk)


def test_who_waits_as_the_server_stops_is_told(notes: Notes) -> None:
    async def talk(process: EmbeddingProcess) -> None:
        waiting = asyncio.create_task(process.embed(["wait"]))
        await notes.wait_for("wait False")
        await process.close()
        with refused("stopping"):
            await waiting
        with refused("stopping"):
            await process.embed(["a"])

    run(notes, talk)


def test_a_process_that_does_not_end_is_killed_at_the_stop(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S_MAX", 0.2)

    async def talk(process: EmbeddingProcess) -> None:
        hanging = asyncio.create_task(process.embed(["hang"]))
        await notes.wait_for("hang False")
        pid = process.pid
        await process.close()
        assert pid is not None and not Path(f"/proc/{pid}").exists()
        with refused("stopping"):
            await hanging

    run(notes, talk)


def test_settings_are_frozen_and_name_no_model_by_default() -> None:
    assert replace(EmbeddingSettings(), idle_s=1) == EmbeddingSettings("", "", 1)
