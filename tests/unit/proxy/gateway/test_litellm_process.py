"""Drives the pinned LiteLLM in its process where a whole server cannot: at once, at its end, late.

What it answers, refuses and chooses is tested at the real server (e2e/gateway).
"""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest
import yaml

from hearth.proxy.gateway import litellm_process
from hearth.proxy.gateway.config.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.gateway.litellm_messages import PATHS
from hearth.proxy.gateway.litellm_process import (
    CONFIG_NAME,
    SOCKET_NAME,
    LiteLLMProcess,
    LiteLLMUnavailable,
)
from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import load_settings
from tests.helpers.cloud.cloud_answers import CloudAnswer
from tests.helpers.cloud.dialect_requests import body_of
from tests.helpers.cloud.gateway_server import cloud_entry
from tests.helpers.servers.mock_cloud import KEY, MockCloud

pytestmark = pytest.mark.process
STOPS: Final = "The server is shutting down."
BODY: Final = json.dumps(body_of("chat", "two", "Hi", stream=True)).encode()
# A callback that chooses no deployment, or hangs at its import.
CALLBACK: Final = """
import asyncio, gc, os, subprocess, time
from litellm.integrations.custom_logger import CustomLogger
class Slow(CustomLogger):
    async def async_filter_deployments(self, model, healthy_deployments, *rest, **more):
        if "A_KEY" in os.environ and collected:
            raise ValueError(f"{collected} collected. " + "x" * 570 + os.environ["A_KEY"])
        await asyncio.sleep(60)
slow, collected, collect = Slow(), 0, gc.collect
def counted():
    global collected
    collected += 1
    collect()
gc.collect = counted
if os.environ.get("HANGS"):
    open(os.environ["HANGS"], "w").close()
    time.sleep(60)
if os.environ.get("STARTS"):
    child = subprocess.Popen(["sleep", "30"])
if "WORDS" in os.environ:
    raise ValueError("a word " * int(os.environ["WORDS"]))
"""


def table_in(directory: Path, cloud: MockCloud, *callbacks: str) -> RoutingTable:
    path = directory / "config.yaml"
    entries = [cloud_entry(cloud, "two", f"openai/{name}") for name in ("first", "second")]
    config = {"model_list": entries, "litellm_settings": {"callbacks": list(callbacks)}}
    path.touch(0o600)
    path.write_text(yaml.safe_dump(config | {"router_settings": {"num_retries": 0}}))
    settings = load_settings({"RUN_DIR": str(directory)}, None)
    return read_table(path, settings, dict(os.environ), {})


@contextlib.asynccontextmanager
async def started(table: RoutingTable) -> AsyncIterator[LiteLLMProcess]:
    process = LiteLLMProcess(table, table.config.path.parent)
    process.start(lambda usage: None)
    try:
        yield process
    finally:
        await process.close()


def newest_child() -> psutil.Process:
    return max(psutil.Process().children(), key=lambda child: float(child.create_time()))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=SuspendingEventLoop) as made:
        yield made


@pytest.fixture(scope="module")
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_its_files_are_private_its_calls_stay_apart_and_end_with_it_behind_what_has_come(
    cloud: MockCloud,
    tmp_path: Path,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """One that was killed is started again by the next request, though not at once each time."""
    monkeypatch.setattr(litellm_process, "RESTART_S_MIN", 1_000.0)
    table = table_in(tmp_path, cloud)
    cloud.forget()

    async def asked(process: LiteLLMProcess, to: Deployment) -> None:
        async with process.call(to, PATHS["chat"], BODY, []) as call:
            assert (await call.start())[0] == 200
            assert b"cloud" in b"".join([part async for part in call.chunks()])
            assert call.failure is None

    async def cut_off(process: LiteLLMProcess, to: Deployment) -> None:
        cloud.say(CloudAnswer("One two.", hangs="amid the text"))
        async with process.call(to, PATHS["chat"], BODY, []) as call:
            await call.start()
            parts = call.chunks()
            assert b"data:" in await anext(parts)
            if how == "stop":
                process.end_calls(STOPS)
            else:
                newest_child().kill()
            async for _ in parts:
                pass
            assert call.failure is not None and not call.is_complete
            assert (str(call.failure) == STOPS) == (how == "stop"), call.failure
        with pytest.raises(LiteLLMUnavailable, match=STOPS if how == "stop" else "LiteLLM"):
            await asked(process, to)
        with pytest.raises(LiteLLMUnavailable):
            await process.choose("two", request={})
        monkeypatch.setattr(litellm_process, "RESTART_S_MIN", 0.0)
        if how == "kill":
            await asyncio.gather(*[asked(process, to) for _ in range(2)])
            return
        with pytest.raises(LiteLLMUnavailable, match=STOPS):
            await asked(process, to)

    async def body() -> None:
        async with started(table) as process:
            while not (tmp_path / CONFIG_NAME).exists():
                await asyncio.sleep(0)
            modes = [(tmp_path / CONFIG_NAME).stat().st_mode]
            (await process.line()).close()
            modes.append((tmp_path / SOCKET_NAME).stat().st_mode)
            assert [stat.S_IMODE(mode) for mode in modes] == [0o600] * 2
            assert not (tmp_path / CONFIG_NAME).exists()
            deployments = table.deployments("two")
            await asyncio.gather(*[asked(process, each) for each in deployments * 5])
            await cut_off(process, deployments[0])

    runner.run(body())
    models = sorted(request.model for request in cloud.generations())
    assert models == ["first"] * (8 if how == "kill" else 6) + ["second"] * 5


def test_a_choice_that_does_not_come_is_waited_for_only_so_long(
    cloud: MockCloud, tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_callback.py").write_text(CALLBACK)
    table = table_in(tmp_path, cloud, "slow_callback.slow")
    asked = {"group": "two", "excluded": [], "preferred": "", "request": {}}

    async def choose() -> None:
        async with started(table) as process:
            line = await process.line()
            with pytest.raises(LiteLLMUnavailable, match=r"has not answered within 0\.1 s"):
                await line.ask("choose", asked, 0.1)
            line.close()

    async def load() -> None:
        async with started(table) as process:
            while not (tmp_path / "hangs").exists():
                await asyncio.sleep(0.02)
            with pytest.raises(LiteLLMUnavailable, match="still loading"):
                await process.choose("two", request={})
            child = newest_child()
        while child.is_running():  # it was killed, and the loop has yet to see its end
            await asyncio.sleep(0.02)

    runner.run(choose())
    monkeypatch.setattr(litellm_process, "READY_S_MAX", 0.01)
    table.environ["HANGS"] = str(tmp_path / "hangs")
    runner.run(load())


def test_a_death_is_noticed_though_a_callbacks_child_lives_on_and_its_reason_is_told_in_short(
    cloud: MockCloud, tmp_path: Path, runner: asyncio.Runner
) -> None:
    (tmp_path / "slow_callback.py").write_text(CALLBACK)
    table = table_in(tmp_path, cloud, "slow_callback.slow")

    async def die() -> None:
        async with started(table) as process:
            (await process.line()).close()
            newest_child().kill()
            while not process.failure:
                await asyncio.sleep(0.01)

    async def refused() -> None:
        async with started(table) as process:
            with pytest.raises(LiteLLMUnavailable, match="ValueError: a word") as caught:
                await process.choose("two", request={})
            assert len(str(caught.value)) < 700

    table.environ["STARTS"] = "1"
    runner.run(die())
    table.environ["WORDS"] = "100000"
    runner.run(refused())


def test_a_crowd_that_leaves_costs_one_collection_and_a_cut_text_shows_no_part_of_a_secret(
    cloud: MockCloud, tmp_path: Path, runner: asyncio.Runner
) -> None:
    (tmp_path / "slow_callback.py").write_text(CALLBACK)
    table = table_in(tmp_path, cloud, "slow_callback.slow")
    table.environ["A_KEY"] = KEY
    asked = {"group": "two", "excluded": [], "preferred": "", "request": {}}

    async def leave() -> None:
        async with started(table) as process:
            lines = [await process.line() for _ in range(50)]
            for line in lines:
                await line.write(json.dumps(["choose", asked]).encode())
            await asyncio.sleep(0.5)
            for line in lines:
                line.close()
            await asyncio.sleep(2)
            with pytest.raises(RequestError, match=r"^[1-9] collected\. x+") as caught:
                await process.choose("two", request={})
            assert KEY[:4] not in str(caught.value)

    runner.run(leave())
