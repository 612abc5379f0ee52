"""Workers that change their models, unload, reload and miss one: real processes that load none."""

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.pool import worker_pool
from hearth.proxy.pool.worker_pool import ModelRequest
from hearth.proxy.workers import model_swap as hosting_module, supervisor as supervisor_module
from hearth.proxy.workers.supervisor import WorkerProcess
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.settings import load_settings
from hearth.shared.suspending_clock import awake_s
from tests.helpers.proxy.fake_worker_pool import read, request, stop
from tests.helpers.proxy.swapping_workers import Host, host

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting_module, "KEEP_S", 0.1)
    monkeypatch.setattr(hosting_module, "LOOK_S", 0.1)
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.2)


async def test_a_request_for_another_model_waits_for_it_and_the_default_comes_back(
    directory: Path,
) -> None:
    async with host(directory) as made:
        (pid,) = made.supervisor.pids
        for model in ("b", "smollm2", ""):
            assert await made.ask(model) == "tok0 "
            assert made.rows("model", "state", "restarts") == [(model or "smollm2", "ready", 0)]
        assert made.supervisor.pids != [pid]
        assert made.pool.facts_of("b") is not None
        assert made.pool.waiting == []


async def test_a_model_is_unloaded_by_wish_unless_it_is_asked_for_before_it_is_idle(
    directory: Path,
) -> None:
    async with host(directory) as made:
        running = await made.open("smollm2", "n=9 delay=0.05", "long")
        made.hosting.unload("smollm2", "")
        later = await made.open("smollm2", name="later")
        assert [(await read(answer))[0][:5] for answer in (running, later)] == ["tok0 "] * 2
        made.hosting.unload("smollm2", "another key, which has not used it")
        await asyncio.sleep(0.3)
        assert made.rows("state") == [("ready",)]
        running = await made.open("", "n=9 delay=0.05", "long")
        made.hosting.unload("", "")
        assert (await read(running))[0].startswith("tok0 ")
        await made.until(lambda: made.rows("state", "pid") == [("unloaded", None)])
        assert await made.pool.ask("cache") == {}, "to ask about it loads nothing"
        await made.pool.load("")
        assert made.rows("state", "restarts") == [("ready", 0)]


async def test_what_runs_is_finished_before_its_model_goes_and_newcomers_wait(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_module, "TURN_S", 0.3)

    async with host(directory) as made:
        running = await made.open("smollm2", "n=20 delay=0.05", "long")
        other = asyncio.create_task(made.ask("b", name="other"))
        link = made.pool.links[0]
        await made.until(lambda: link.closed_at is not None)
        late = asyncio.create_task(made.ask("smollm2", name="late"))
        text, finished = await read(running)
        assert (text.count("tok"), finished.reason) == (20, "stop")
        assert not other.done() and not late.done()
        assert link.load == 0, "the late one was not sent to it"
        assert await other == await late == "tok0 "


async def test_choices_of_one_request_are_not_parted_by_a_switch(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_module, "TURN_S", 0.2)

    async with host(directory) as made:
        came_at = awake_s()
        first = await made.open("smollm2", "n=20 delay=0.05", "first")
        other = asyncio.create_task(made.ask("b", name="other"))
        await made.until(lambda: made.pool.links[0].closed_at is not None)
        asked = dataclasses.replace(request("n=1"), target="smollm2")
        assert (await read(await made.pool.open(asked, "second", came_at)))[0] == "tok0 "
        assert not first.ended_as and not other.done()
        await read(first)
        assert await other == "tok0 "


async def test_a_switch_that_nobody_waits_for_any_more_is_off(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_module, "TURN_S", 0.2)

    async with host(directory) as made:
        (pid,) = made.supervisor.pids
        running = await made.open("smollm2", "n=9999 delay=0.05", "long")
        other = asyncio.create_task(made.ask("b", name="other"))
        link = made.pool.links[0]
        await made.until(lambda: link.closed_at is not None)
        late = asyncio.create_task(made.ask("smollm2", name="late"))
        other.cancel()
        assert await late == "tok0 "
        assert link.closed_at is None
        assert made.supervisor.pids == [pid]
        running.close()


async def test_a_model_that_cannot_be_loaded_is_told_with_its_reason_and_the_default_comes_back(
    directory: Path,
) -> None:
    async with host(directory) as made:
        failing = asyncio.create_task(made.ask("broken", name="failing"))
        await made.until(lambda: made.rows("model") == [("broken",)])
        waiting = asyncio.create_task(made.ask("smollm2", name="waiting"))
        with pytest.raises(RequestError, match="'/missing', which is no model") as caught:
            await failing
        assert made.rows("state") != [("ready",)], "it is told before the default is back"
        assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
        assert await waiting == "tok0 "
        (pid,) = made.supervisor.pids
        with pytest.raises(RequestError, match="tried again when it is asked for in"):
            await made.ask("broken")
        assert made.supervisor.pids == [pid], "and nobody's model went for it"
        assert not made.supervisor.cannot_start.is_set()


async def test_a_model_whose_load_kills_the_worker_is_not_tried_for_ever(directory: Path) -> None:
    async with host(directory) as made:
        asking = asyncio.create_task(made.ask("b"))
        await made.until(lambda: made.rows("state", "model") == [("loading", "b")])
        await made.until(lambda: made.supervisor.pids)
        os.kill(made.supervisor.pids[0], signal.SIGKILL)
        with pytest.raises(RequestError, match=r"died while it loaded \(SIGKILL"):
            await asking
        assert await made.ask("smollm2") == "tok0 "


async def test_a_worker_without_a_step_is_killed_its_client_told_and_another_started(
    directory: Path,
) -> None:
    async with host(directory, stall_s=2.0) as made:
        busy = await made.ask("smollm2", "n=60 delay=0.05", "busy")
        assert busy.count("tok") == 60, "one that gets on is left alone"
        answer = await made.open("smollm2", "n=9999 delay=0.2 hang=1")
        with pytest.raises(WorkerLost, match=r"SIGKILL: it held requests and made no step for"):
            await read(answer)
        await made.until(lambda: made.rows("state", "restarts") == [("ready", 1)])
        assert await made.ask("smollm2") == "tok0 "


async def test_clients_of_a_stuck_worker_are_told_though_it_does_not_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host(directory, stall_s=1.0) as made:
        (pid,) = made.supervisor.pids
        with monkeypatch.context() as patch:
            patch.setattr(
                WorkerProcess, "kill", lambda *_: None
            )  # as in a driver that never returns
            answer = await made.open("smollm2", "n=9999 delay=0.2 hang=1")
            with pytest.raises(WorkerLost, match="made no step for"):
                await read(answer)
        assert made.rows("pid", "restarts") == [(pid, 0)]
        os.kill(pid, signal.SIGKILL)
        await made.until(lambda: made.rows("state", "restarts") == [("ready", 1)])


async def test_who_waits_in_vain_is_told_what_the_workers_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting_module, "LOAD_WAIT_S_MAX", 1.2)

    async with host(directory) as made:
        running = await made.open("smollm2", "n=9999 delay=0.05", "long")
        with pytest.raises(RequestError) as caught:
            await made.ask("b")
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert "worker 0 is ready with 'smollm2'" in str(caught.value)
        running.close()


async def test_a_signal_while_a_model_changes_leaves_no_process(directory: Path) -> None:
    async with host(directory) as made:
        pids = made.supervisor.pids
        os.kill(pids[0], signal.SIGSTOP)  # so that it takes its time to end
        asking = asyncio.create_task(made.ask("b"))
        await made.until(lambda: made.rows("state") == [("unloading",)])
        made.pool.close()
        await stop(made.supervisor)
        with pytest.raises(WorkerLost, match="shutting down"):
            await asking
        for pid in pids + made.supervisor.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_who_waits_is_seen_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting_module, "LOOK_S", 3_600.0)

    async with host(directory) as made:
        assert await made.ask("b") == "tok0 "


async def test_who_has_not_yet_heard_of_a_failed_load_takes_no_other_models_worker(
    directory: Path,
) -> None:
    async with host(directory) as made:
        with pytest.raises(RequestError):
            await made.ask("broken")
        await made.until(lambda: made.rows("state") == [("ready",)])
        await asyncio.sleep(0.2)
        made.pool.waiting.append(ModelRequest("broken", awake_s()))
        made.hosting.arrange()
        assert made.rows("state", "model") == [("ready", "smollm2")]
        made.pool.waiting.clear()


async def test_a_stuck_worker_is_left_alone_where_that_is_not_wanted(directory: Path) -> None:
    async with host(directory, stall_s=0.0) as made:
        assert (await made.ask("smollm2", "n=10 delay=0.2 hang=1")).count("tok") == 10
        assert made.rows("restarts") == [(0,)]


async def test_no_more_wait_than_the_room_holds(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "WAITING_MAX", 3)

    async with host(directory) as made:
        asking = [asyncio.create_task(made.ask("b", name=str(number))) for number in range(3)]
        await made.until(lambda: len(made.pool.waiting) == 3)
        with pytest.raises(RequestError, match=r"3 requests wait .* this server holds 3"):
            await made.ask("b", name="one more")
        assert await asyncio.gather(*asking) == ["tok0 "] * 3


# ---------------------------------------------------------------- a default model that is missing


async def refuse_missing(made: Host, model: str = "smollm2") -> None:
    """Have a request for a model that is not on this disk refused at once, with what is told."""
    began = time.monotonic()
    with pytest.raises(RequestError, match="smollm2 is not here") as caught:
        await made.ask(model)
    assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
    assert time.monotonic() - began < worker_pool.READY_WAIT_S_MAX
    assert made.hosting.why_missing() == "smollm2 is not here."


async def test_without_the_default_model_no_worker_starts_until_it_is_there(
    directory: Path,
) -> None:
    async with host(directory, 2, absent="smollm2") as made:
        await refuse_missing(made)
        await refuse_missing(made, "")
        for others, is_ready in (("", False), ("b=/b", True)):
            settings = load_settings({"MODELS": others}, None)
            health = AdminRoutes(settings, "0", made.supervisor, made.pool).health()
            assert (health["status"], health["ready"]) == ("ok", is_ready)
        assert made.supervisor.pids == []
        made.absent = ""
        assert await made.ask("smollm2") == "tok0 "
        assert made.rows("state", "restarts") == [("ready", 0), ("unloaded", 0)]
        assert made.hosting.why_missing() == ""


async def test_other_models_are_served_without_the_default_one(directory: Path) -> None:
    async with host(directory, absent="smollm2") as made:
        with pytest.raises(RequestError, match="'/missing', which is no model"):
            await made.ask("broken")
        await made.until(lambda: made.rows("state", "model") == [("unloaded", "smollm2")])
        assert not made.supervisor.cannot_start.is_set(), "the server outlives it"
        assert await made.ask("b") == "tok0 "
        (pid,) = made.supervisor.pids
        await refuse_missing(made)
        assert made.supervisor.pids == [pid], "and the model that works stays"
