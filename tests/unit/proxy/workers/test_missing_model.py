"""Serving without the default model: no worker starts until it is there."""

import time
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

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_swap_policy, "KEEP_S", 0.1)
    monkeypatch.setattr(model_swap, "LOOK_S", 0.1)
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.2)


async def refuse_missing(made: Host, model: str = "smollm2") -> None:
    """Have a request for a model that is not on this disk refused at once, with what is told."""
    began = time.monotonic()
    with pytest.raises(RequestError, match="smollm2 is not here") as caught:
        await made.ask(model)
    assert (caught.value.status, caught.value.code) == (503, "model_unavailable")
    assert time.monotonic() - began < waiting_requests.READY_WAIT_S_MAX
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
