"""LiteLLM's thread may end at any time: whoever waits for it is told, and nobody waits for ever.

What stands for LiteLLM here is an app and a Router of the test's own, in the real thread.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from hearth.proxy.gateway import litellm_thread
from hearth.proxy.gateway.cloud.cloud_call import CloudCall
from hearth.proxy.gateway.config.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.gateway.litellm_thread import LiteLLMThread, LiteLLMUnavailable
from hearth.shared.settings_from_env import load_settings

pytestmark = pytest.mark.process  # each loop has sockets
WAIT_S_MAX = 60.0
ENTRY = {"model_name": "cloud", "litellm_params": {"model": "openai/x"}}
STOPS = "The server is shutting down."


@dataclass
class Call:
    """What the hooks would know of one."""

    pinned: str = ""
    excluded: frozenset[str] = frozenset()
    preferred: str = ""
    failure: BaseException | None = None

    def enter(self) -> None:
        pass


class Thread(LiteLLMThread):
    """LiteLLM's thread with another app; its import waits until `loads` is set."""

    def __init__(self, table: RoutingTable, directory: Path) -> None:
        super().__init__(table, directory, asyncio.new_event_loop)
        self.loads = threading.Event()
        self.cancelled = threading.Event()  # a call has been

    def _load(self) -> None:
        assert self.loads.wait(WAIT_S_MAX)
        self._hooks = SimpleNamespace(RoutedCall=Call, app_token="t")
        router = SimpleNamespace(async_get_available_deployment=self._never)
        app: Any = self._app
        self._server = SimpleNamespace(app=_App(app), llm_router=router)

    async def _never(self, **asked: Any) -> Any:
        await asyncio.sleep(60)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if body == b"exit":
            raise SystemExit(3)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class _App:
    """An ASGI app with the lifespan that LiteLLM's has."""

    def __init__(self, answer: Callable[..., Awaitable[None]]) -> None:
        self.router = SimpleNamespace(lifespan_context=self._lifespan)
        self._answer = answer

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[dict[str, Any]]:
        yield {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer(scope, receive, send)


@pytest.fixture
def thread(tmp_path: Path) -> Iterator[Thread]:
    path = tmp_path / "config.yaml"
    path.write_bytes(orjson.dumps({"model_list": [ENTRY]}))
    table = read_table(path, load_settings({"RUN_DIR": str(tmp_path)}, None), {}, {})
    made = Thread(table, tmp_path)
    yield made
    made.loads.set()
    made._thread.join(WAIT_S_MAX)
    made._loop.close()


def cloud(thread: LiteLLMThread) -> Deployment:
    return thread._table.deployments("cloud")[0]


async def read(call: CloudCall) -> tuple[int, bytes, str]:
    """Return a call's status, what came of its reply, and why it is not whole."""
    async with call:
        status, _ = await call.start()
        data = b"" if call.failure else b"".join([part async for part in call.chunks()])
        assert call.failure is not None
        return status, data, call.failure.text


async def begun(thread: Thread) -> None:
    thread.start()
    thread.loads.set()
    await thread.ready()


def test_a_thread_that_dies_ends_its_calls_and_says_so_from_then_on(thread: Thread) -> None:
    async def talk() -> None:
        await begun(thread)
        reading = asyncio.create_task(read(await thread.call(cloud(thread), "/", b"stay", [])))
        await asyncio.sleep(0.1)
        status, _, why = await read(await thread.call(cloud(thread), "/", b"exit", []))
        assert status == 503 and "LiteLLM has ended: SystemExit: 3." in why
        assert await reading == (200, b"half", why)
        assert not thread.is_usable
        with pytest.raises(LiteLLMUnavailable, match="has ended"):
            await thread.choose("cloud")
        assert await asyncio.to_thread(thread.cancelled.wait, WAIT_S_MAX), "its connection is shut"

    asyncio.run(asyncio.wait_for(talk(), WAIT_S_MAX))


def test_a_stop_ends_calls_and_lets_callbacks_end(thread: Thread) -> None:
    async def talk() -> None:
        await begun(thread)
        reading = asyncio.create_task(read(await thread.call(cloud(thread), "/", b"stay", [])))
        await asyncio.sleep(0.1)
        thread.end_calls(STOPS)
        assert await reading == (200, b"half", STOPS)
        with pytest.raises(LiteLLMUnavailable, match=STOPS):
            await thread.call(cloud(thread), "/", b"stay", [])
        assert await thread.run(lambda: asyncio.sleep(0, "its callbacks still run")) is not None
        await thread.close()
        assert not thread._thread.is_alive()

    asyncio.run(asyncio.wait_for(talk(), WAIT_S_MAX))


def test_a_stop_waits_for_no_import(thread: Thread) -> None:
    async def talk() -> None:
        thread.start()
        waiting = asyncio.create_task(thread.choose("cloud"))
        await asyncio.sleep(0.1)
        thread.end_calls(STOPS)
        with pytest.raises(LiteLLMUnavailable, match=STOPS):
            await waiting
        await thread.close()
        assert thread._thread.is_alive()  # amid an import that does not end

    asyncio.run(asyncio.wait_for(talk(), WAIT_S_MAX))


def test_a_choice_that_does_not_come_is_waited_for_only_so_long(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litellm_thread, "CHOICE_S_MAX", 0.1)

    async def talk() -> None:
        await begun(thread)
        with pytest.raises(LiteLLMUnavailable, match="has chosen no deployment"):
            await thread.choose("cloud")
        await thread.close()

    asyncio.run(asyncio.wait_for(talk(), WAIT_S_MAX))
