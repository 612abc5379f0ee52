"""Serving without the default model: no worker starts until it is there."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.pool import waiting_requests
from hearth.proxy.workers import (
    model_swap,
    model_swap_policy,
    supervisor as supervisor_module,
)
from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import load_settings
from tests.helpers.proxy.swapping_workers import Host, host
from tests.helpers.worker_processes.fake_worker import MISSING

pytestmark = pytest.mark.process


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: a Unix socket's may have 107 bytes."""
    monkeypatch.setattr(model_swap_policy, "KEEP_S", 0.1)
    monkeypatch.setattr(model_swap, "LOOK_S", 0.1)
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.2)
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        yield Path(name)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 180))  # type: ignore[arg-type]


async def refuse_missing(made: Host, model: str = "smollm2") -> None:
    """Have a request for a model that is not on this disk refused at once, with what is told."""
    began = time.monotonic()
    with pytest.raises(RequestError, match="smollm2 is not here") as caught:
        await made.ask(model)
    assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
    assert time.monotonic() - began < waiting_requests.READY_WAIT_S_MAX
    assert made.hosting.why_missing() == "smollm2 is not here."


def test_without_the_default_model_no_worker_starts_until_it_is_there(directory: Path) -> None:
    async def body() -> None:
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

    run(body)


def test_other_models_are_served_without_the_default_one(directory: Path) -> None:
    async def body() -> None:
        async with host(directory, absent="smollm2") as made:
            with pytest.raises(RequestError, match="'/missing', which is no model"):
                await made.ask("broken")
            await made.until(lambda: made.rows("state", "model") == [("unloaded", "smollm2")])
            assert not made.supervisor.cannot_start.is_set(), "the server outlives it"
            assert await made.ask("b") == "tok0 "
            (pid,) = made.supervisor.pids
            await refuse_missing(made)
            assert made.supervisor.pids == [pid], "and the model that works stays"

    run(body)


def test_a_default_model_that_goes_away_is_served_until_its_worker_ends(directory: Path) -> None:
    async def body() -> None:
        async with host(directory) as made:
            made.absent = "smollm2"
            assert await made.ask("smollm2") == "tok0 "
            assert made.hosting.why_missing() == "", "a worker has it"
            made.supervisor.environ["MODEL_PATH"] = MISSING
            os.kill(made.supervisor.pids[0], signal.SIGKILL)
            await made.until(lambda: made.rows("state") == [("unloaded",)])
            await refuse_missing(made)

    run(body)


def test_a_server_without_workers_of_its_own_misses_no_model(directory: Path) -> None:
    async def body() -> None:
        async with host(directory, 0, absent="smollm2") as made:
            assert made.hosting.missing_at_start == made.hosting.why_missing() == ""

    run(body)
