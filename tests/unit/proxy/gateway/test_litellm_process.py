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
from hearth.proxy.gateway.litellm_messages import HELD_BYTES_MAX, PATHS, read_frame
from hearth.proxy.gateway.litellm_process import (
    CONFIG_NAME,
    SOCKET_NAME,
    LiteLLMConnection,
    LiteLLMProcess,
    LiteLLMUnavailable,
)
from hearth.proxy.gateway.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.shared.errors import RequestError
from hearth.shared.settings import load_settings
from tests.helpers.cloud.cloud_answers import CloudAnswer
from tests.helpers.cloud.dialect_requests import body_of
from tests.helpers.cloud.gateway_server import cloud_entry
from tests.helpers.servers.mock_cloud import KEY, MockCloud

pytestmark = pytest.mark.process
LOOP_FACTORY = SuspendingEventLoop  # the server's
STOPS: Final = "The server is shutting down."
BODY: Final = json.dumps(body_of("chat", "two", "Hi", stream=True)).encode()
CHOICE: Final = {"group": "two", "excluded": [], "preferred": "", "request": {}}
# A callback that chooses no deployment until there was a collection, and one whose child lives on.
CALLBACKS: Final = """
import asyncio, gc, os, pathlib, re, subprocess
from litellm.integrations.custom_logger import CustomLogger
class Slow(CustomLogger):
    async def async_filter_deployments(self, model, healthy_deployments, *rest, **more):
        if collected:
            raise ValueError(f"{collected} collected. " + "x" * 1_970 + os.environ["A_KEY"])
        await asyncio.sleep(60)
class HeldUp(CustomLogger):
    async def async_filter_deployments(self, model, healthy_deployments, *rest, **more):
        pathlib.Path(__file__).with_name("held_up").touch()
        re.match("(a+)+b", "a" * 64)
slow, held_up, other, collected, collect = Slow(), HeldUp(), CustomLogger(), 0, gc.collect
def counted():
    global collected
    collected += 1
    collect()
gc.collect = counted
if "A_KEY" not in os.environ:
    child = subprocess.Popen(["sleep", "30"])
"""


def table_in(directory: Path, cloud: MockCloud, callback: str) -> RoutingTable:
    (directory / "own_callbacks.py").write_text(CALLBACKS)
    path = directory / "config.yaml"
    entries = [cloud_entry(cloud, "two", f"openai/{name}") for name in ("first", "second")]
    config = {
        "model_list": entries,
        "litellm_settings": {"callbacks": [f"own_callbacks.{callback}"]},
    }
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


@pytest.fixture(scope="module")
def cloud() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_its_files_are_private_its_calls_stay_apart_and_end_with_it_behind_what_has_come(
    cloud: MockCloud,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """A death is noticed though a callback's child lives on.

    It is started again by the next request, though not at once each time.
    """
    monkeypatch.setattr(litellm_process, "RESTART_S_MIN", 1_000.0)
    table = table_in(tmp_path, cloud, "other")
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
        while how == "kill" and not process.failure:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(litellm_process, "RESTART_S_MIN", 0.0)
        if how == "kill":
            await asyncio.gather(*[asked(process, to) for _ in range(2)])
            return
        with pytest.raises(LiteLLMUnavailable, match=STOPS):
            await asked(process, to)

    async with started(table) as process:
        while not (tmp_path / CONFIG_NAME).exists():
            await asyncio.sleep(0)
        modes = [(tmp_path / CONFIG_NAME).stat().st_mode]
        (await process.connect()).close()
        modes.append((tmp_path / SOCKET_NAME).stat().st_mode)
        assert [stat.S_IMODE(mode) for mode in modes] == [0o600] * 2
        assert not (tmp_path / CONFIG_NAME).exists()
        deployments = table.deployments("two")
        await asyncio.gather(*[asked(process, each) for each in deployments * 5])
        await cut_off(process, deployments[0])
    models = sorted(request.model for request in cloud.generations())
    assert models == ["first"] * (8 if how == "kill" else 6) + ["second"] * 5


async def test_one_that_stands_still_ends_itself_and_is_started_again_and_one_that_runs_does_not(
    cloud: MockCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in Python runs while a pattern is looked for; a stop comes first, and kills it."""
    monkeypatch.setattr(litellm_process, "STALL_S_MAX", 5.0)
    monkeypatch.setattr(litellm_process, "CLOSE_S_MAX", 0.2)
    monkeypatch.setattr(litellm_process, "RESTART_S_MIN", 0.0)
    held_up = tmp_path / "held_up"

    async with started(table_in(tmp_path, cloud, "held_up")) as process:
        (await process.connect()).close()
        child = newest_child()
        for _ in range(13):  # more than STALL_S_MAX; one wait of it were a sleeping machine's
            await asyncio.sleep(0.5)
        assert child.is_running()
        with pytest.raises(LiteLLMUnavailable):
            await process.choose("two", request={})
        assert held_up.exists()
        while not process.failure:
            await asyncio.sleep(0.02)
        held_up.unlink()
        line = await process.connect()
        assert not child.is_running()
        child = newest_child()
        await line.write(json.dumps(["choose", CHOICE]).encode())
        while not held_up.exists():
            await asyncio.sleep(0.02)
    line.close()
    assert not child.is_running()


async def test_a_choice_is_waited_for_only_so_long_and_a_crowd_that_leaves_costs_one_collection(
    cloud: MockCloud, tmp_path: Path
) -> None:
    """And a cut text shows no part of a secret."""
    table = table_in(tmp_path, cloud, "slow")
    table.environ["A_KEY"] = KEY

    async with started(table) as process:
        lines = [await process.connect() for _ in range(50)]
        with pytest.raises(LiteLLMUnavailable, match=r"has not answered within 0\.1 s"):
            await lines[0].ask("choose", CHOICE, 0.1)
        for line in lines[1:]:
            await line.write(json.dumps(["choose", CHOICE]).encode())
        await asyncio.sleep(0.5)
        for line in lines:
            line.close()
        await asyncio.sleep(2)
        with pytest.raises(RequestError, match=r"^[1-9] collected\. x+") as caught:
            await process.choose("two", request={})
        assert KEY[:4] not in str(caught.value)


async def test_who_waits_for_it_to_load_is_told_after_a_while_and_a_stop_ends_it_amid_that(
    cloud: MockCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litellm_process, "READY_S_MAX", 0.01)
    before = set(psutil.Process().children())

    async with started(table_in(tmp_path, cloud, "other")) as process:
        while not (born := set(psutil.Process().children()) - before):
            await asyncio.sleep(0.01)
        with pytest.raises(LiteLLMUnavailable, match="still loading"):
            await process.choose("two", request={})
    assert not any(child.is_running() for child in born)


async def test_a_large_body_goes_a_part_at_a_time_and_holds_nobody_up(tmp_path: Path) -> None:
    read, frames, body = asyncio.Event(), list[bytes](), os.urandom(1 << 20) * 8

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read.wait()
        frames.append(await read_frame(reader))
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "sock"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "sock")
        line = LiteLLMConnection(reader, writer)
        writing = asyncio.create_task(line.write(body))
        await asyncio.sleep(0.1)
        assert writer.transport.get_write_buffer_size() <= 2 * HELD_BYTES_MAX
        read.set()
        await writing
        with pytest.raises(LiteLLMUnavailable):
            await line.read()
        await line.write(body)  # nobody reads it
        line.close()
    assert frames == [body]
