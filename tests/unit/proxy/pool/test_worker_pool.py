"""The pool and the supervisor against scripted workers: real processes, real ZeroMQ, no LiteLLM."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.pool import worker_pool as pool_module
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.workers import supervisor as supervisor_module
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.wire_messages import Admitted, Counted, Delta, Finished, Progress, Usage
from hearth.shared.zmq_transport import LEASE_S
from tests.helpers.proxy.fake_worker_pool import bench, pool_without_swaps, read, request, start
from tests.helpers.proxy.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.process


async def test_an_answer_arrives_whole(directory: Path) -> None:
    async with bench(directory) as made:
        answer = await start(made, "n=3")
        assert answer.prompt_tokens > 0
        text, finished = await read(answer)
        assert text == "tok0 tok1 tok2 "
        assert finished.usage.completion_tokens == 3
        assert (await made.pool.count(request("a b c"))).tokens == 6
        assert made.pool.facts_of() is not None


async def test_a_refusal_keeps_its_status_and_code(directory: Path) -> None:
    async with bench(directory) as made:
        with pytest.raises(RequestError) as caught:
            await start(made, "refuse=400:context_length_exceeded")
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert made.pool.links[0].load == 0


async def test_a_closed_answer_is_cancelled_at_once(directory: Path) -> None:
    async with bench(directory) as made:
        answer = await start(made, "n=1000 delay=0.05")
        await answer.next_event()
        closed_at = time.time()
        answer.close()
        with pytest.raises(ClientGone):
            await answer.next_event()
        await made.until(lambda: made.events("Cancel"))
        assert made.events("Cancel")[0]["at"] - closed_at < LEASE_S, "not when its lease ends"


async def test_a_request_given_up_before_it_is_admitted_is_cancelled(directory: Path) -> None:
    async with bench(directory) as made:
        os.kill(made.supervisor.pids[0], signal.SIGSTOP)
        opening = asyncio.create_task(start(made, "n=3"))
        await asyncio.sleep(0.1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        os.kill(made.supervisor.pids[0], signal.SIGCONT)
        await made.until(lambda: made.events("Cancel"))


async def test_a_lease_is_renewed_while_the_client_is_there_and_not_after(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LEASE_RENEW_S", 0.1)

    async with bench(directory) as made:
        kept = await start(made, "n=1 prefill=30", "kept")
        left = await start(made, "n=1 prefill=30", "left")
        left.close()
        await made.until(lambda: len(made.events("Cancel")) == 1)
        before = len(made.events("Renew"))
        await made.until(lambda: len(made.events("Renew")) >= before + 4)
        renewed = [row["request_ids"] for row in made.events("Renew")[before:]]
        assert all(ids == ["kept"] for ids in renewed)
        kept.close()
        await made.until(lambda: len(made.events("Cancel")) == 2)
        ended = len(made.events("Renew"))
        await asyncio.sleep(0.3)
        assert len(made.events("Renew")) == ended


async def test_what_waits_for_one_reply_keeps_its_lease_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LEASE_RENEW_S", 0.1)

    async with bench(directory) as made:
        os.kill(made.supervisor.pids[0], signal.SIGSTOP)
        asking = [
            asyncio.create_task(made.pool.count(request("a b c"))),
            asyncio.create_task(made.pool.ask("cache")),
        ]
        await asyncio.sleep(0.3)
        os.kill(made.supervisor.pids[0], signal.SIGCONT)
        counted, told = await asyncio.gather(*asking)
        assert isinstance(counted, Counted) and counted.tokens == 6
        assert told == {0: {"bytes": 0, "entries": []}}
        ids = [made.events(kind)[0]["request_id"] for kind in ("Count", "Status")]
        await made.until(lambda: made.events("Renew"))
        assert made.events("Renew")[-1]["request_ids"] == ids
        assert made.pool.links[0].load == 0


async def test_a_death_before_admission_asks_another_worker_once(directory: Path) -> None:
    async with bench(directory, 2) as made:
        os.kill(made.supervisor.pids[0], signal.SIGSTOP)
        opening = asyncio.create_task(start(made, "n=2"))
        await asyncio.sleep(0.1)
        os.kill(made.supervisor.pids[0], signal.SIGKILL)
        assert (await read(await opening))[0] == "tok0 tok1 "


async def test_a_request_that_kills_does_not_kill_them_all(directory: Path) -> None:
    async with bench(directory, 3) as made:
        with pytest.raises(WorkerLost):
            await start(made, "die=0")
        await asyncio.sleep(0.1)  # for the deaths to be noticed
        await made.until(lambda: made.ready_count() == 3)
        assert sum(worker.restarts for worker in made.supervisor.workers) == 2


async def test_a_lost_frame_ends_the_answer(directory: Path) -> None:
    async with bench(directory) as made:
        with pytest.raises(WorkerLost) as caught:
            await read(await start(made, "n=5 lose=3"))
        assert "Part 2" in str(caught.value)


async def test_a_silent_worker_is_killed_and_replaced(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "SILENCE_S_MAX", 1.5)
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.2)

    async with bench(directory) as made:
        os.kill(made.supervisor.pids[0], signal.SIGSTOP)
        await made.until(lambda: made.supervisor.workers[0].restarts == 1)
        await made.until(lambda: made.ready_count() == 1)


def test_only_deaths_before_ready_back_off() -> None:
    assert [supervisor_module.backoff_s(count) for count in range(8)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        30,
        30,
    ]


async def test_a_reload_that_fails_after_a_good_start_is_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BACKOFF_S_MAX", 0.1)
    obstacle = directory / "obstacle"

    async with bench(directory, FAKE_WORKER_REFUSES_WHILE=str(obstacle)) as made:
        await made.until(lambda: made.ready_count() == 1)
        obstacle.touch()
        os.kill(made.supervisor.pids[0], signal.SIGKILL)
        await made.until(lambda: made.supervisor.workers[0].early_deaths > 1)
        assert not made.supervisor.cannot_start.is_set()
        assert "died" in made.pool.unavailable_reason
        obstacle.unlink()
        await made.until(lambda: made.ready_count() == 1)


# ---------------------------------------------------------------- Answer alone


def lone() -> tuple[AnswerStream, list[bool]]:
    released: list[bool] = []
    return AnswerStream("r", released.append), released


def delta(seq: int, channel: str, text: str) -> Delta:
    return Delta("r", seq, channel, text)


async def test_an_answer_begins_with_what_was_kept_of_it_but_not_a_busy_models_chunk_later() -> (
    None
):

    planned, _ = lone()
    planned.receive(Admitted("r", 5))
    planned.receive(Progress("r", 3, 5))
    planned.receive(Progress("r", 4, 5))
    await planned.admitted()
    await planned.planned()
    assert (planned.cached_tokens, planned.done_tokens) == (3, 4)
    planned.receive(Progress("r", 1, 5))  # the disk had not what it promised
    assert (planned.cached_tokens, planned.done_tokens) == (1, 1)
    assert not planned.is_prefilling
    busy, _ = lone()
    busy.receive(Admitted("r", 5))
    async with asyncio.timeout(60):
        await busy.admitted()
        await busy.planned()
    assert (busy.prompt_tokens, busy.cached_tokens) == (5, 0)
    for answer in (planned, busy):
        answer.close()


async def test_deltas_that_wait_together_come_as_one_for_each_channel() -> None:
    answer, released = lone()
    answer.receive(Admitted("r", 5))
    for row in ("reasoning a", "reasoning b", "content c", "content d", "reasoning e"):
        channel, text = row.split()
        answer.receive(delta(answer.next_seq, channel, text))
    answer.receive(Finished("r", "stop", None, Usage(5, 2, 3, 5)))
    texts = []
    while isinstance(row := await answer.next_event(), Delta):
        texts.append((row.channel, row.text))
    assert texts == [("reasoning", "ab"), ("content", "cd"), ("reasoning", "e")]
    assert released == [False]
    answer.close()
    assert released == [False]


async def test_silence_is_none_and_an_error_is_told_to_whoever_asks_again() -> None:
    answer, released = lone()
    assert await answer.next_event(0.01) is None
    answer.fail(WorkerLost("gone"))
    for _ in range(2):
        with pytest.raises(WorkerLost):
            await answer.next_event()
    assert released == [False]


def test_each_delta_is_given_when_it_comes_and_a_silence_when_nothing_did() -> None:
    async def body() -> list[tuple[float, Any]]:
        answer, _ = lone()
        loop = asyncio.get_running_loop()
        for seq, at in enumerate((0.0, 0.9, 1.8)):
            loop.call_later(at, answer.receive, delta(seq, "content", "x"))
        loop.call_later(4.5, answer.receive, Finished("r", "stop", None, Usage(1, 0, 1, 3)))
        told: list[tuple[float, Any]] = []
        while not told or not isinstance(told[-1][1], Finished):
            row = await answer.next_event(1.0)
            told.append((round(loop.time(), 2), row.text if isinstance(row, Delta) else row))
        return told

    told = run_in_virtual_time(body())
    assert told[:-1] == [(0.0, "x"), (0.9, "x"), (1.8, "x"), (2.8, None), (3.8, None)]
    assert told[-1][0] == 4.5


async def test_an_answer_the_worker_gave_up_is_an_error() -> None:
    answer, _ = lone()
    answer.receive(Finished("r", "cancelled", None, Usage(1, 0, 1, 0)))
    with pytest.raises(WorkerLost):
        await answer.next_event()


@pytest.mark.parametrize("steps_between", range(6))
async def test_a_cancellation_is_not_swallowed_as_everyone_is_woken(steps_between: int) -> None:
    """Before Python 3.12 `asyncio.wait_for` drops one that comes as what it waits for ends."""
    pool = pool_without_swaps()
    task = asyncio.create_task(pool.load(""))
    while not pool.waiting:
        await asyncio.sleep(0)
    pool.wake()
    for _ in range(steps_between):
        await asyncio.sleep(0)
    assert task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and not pool.waiting
