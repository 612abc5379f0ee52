"""A body of any size holds no other client up on its way to a cloud, nor a response back."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from hearth.proxy.api.body.prompt_limits import MESSAGES_MAX
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway import gateway
from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.cloud.cloud_bodies import cloud_body
from hearth.proxy.gateway.config.routing_table import Deployment, RoutingTable, read_table
from hearth.proxy.gateway.gateway import CloudReply, Gateway, GatewayCall
from hearth.proxy.gateway.litellm_process import LiteLLMProcess
from hearth.proxy.http.body_memory_budget import BodyBudget
from hearth.proxy.http.http_exchange import HttpExchange
from hearth.proxy.request.model_names import ModelNames
from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import load_settings

PARTS = 1_000
RESPONSE = {"id": "resp_1", "status": "completed", "object": "response", "output": []}
ENDED = b"data: %b\n\n" % orjson.dumps({"type": "response.completed", "response": RESPONSE})


class Cloud:
    """Stands for LiteLLM, and for the one call to it: it answers with `chunks`."""

    is_usable = True
    is_complete = True
    failure = None

    def __init__(self, table: RoutingTable, chunks: list[bytes]) -> None:
        self.table = table
        self.sent = b""
        self._chunks = chunks

    async def choose(self, group: str, **_: Any) -> Deployment:
        return self.table.deployments(group)[0]

    def call(self, deployment: Deployment, path: str, body: bytes, headers: Any) -> "Cloud":
        self.sent = body
        return self

    async def __aenter__(self) -> "Cloud":
        return self

    async def __aexit__(self, *_: object) -> None:
        """There is nothing to leave."""

    async def start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        return 200, []

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


class Records:
    def fell_back(self, cause: str) -> None:
        raise AssertionError(cause)

    def cloud_ended(self, exchange: HttpExchange, call: GatewayCall, reply: CloudReply) -> None:
        """What became of it is seen by whom it is told."""


class World:
    """A gateway before a cloud. `kept` has how many responses were kept before each piece left."""

    def __init__(self, directory: Path, chunks: list[bytes]) -> None:
        path = directory / "config.yaml"
        row = {"model_name": "cloud", "litellm_params": {"model": "openai/x"}}
        path.write_bytes(orjson.dumps({"model_list": [row]}))
        settings = load_settings({}, None)
        table = read_table(path, settings, {}, {})
        self.cloud = Cloud(table, chunks)
        self.store = ResponseStore()
        self.kept: list[tuple[bytes, int]] = []
        self.gateway = Gateway(
            table,
            ModelNames.of(settings),
            cast(LiteLLMProcess, self.cloud),
            self.store,
            Records(),
            Accounts({}, cast(Any, None), checks_keys=False),
        )

    async def ask(self, dialect: Any, body: dict[str, Any], size: int) -> None:
        exchange = HttpExchange(
            {"type": "http", "method": "POST", "path": "/v1/responses", "headers": []},
            asyncio.Event().wait,  # type: ignore[arg-type]
            self._send,
            BodyBudget(),
        )
        call = GatewayCall(dialect, body, size, cast(Any, None))
        try:
            await self.gateway.serve(exchange, "cloud", call)
        finally:
            exchange.end()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.kept.append((message["body"], len(self.store)))


def parts(text: str = "a") -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for _ in range(PARTS)]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize(("size", "is_apart"), [(100, False), (10_000_000, True)])
def test_a_large_body_is_filtered_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, size: int, is_apart: bool
) -> None:
    """400,000 parts take over half a second, in which nobody else would be served."""
    body = {"model": "cloud", "max_tokens": 1, "messages": [{"role": "user", "content": parts()}]}
    threads = set()

    def noted(*given: Any) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return cloud_body(*given)

    monkeypatch.setattr(gateway, "cloud_body", noted)
    world = World(tmp_path, [b"{}"])
    asyncio.run(world.ask(dialect, body, size))
    assert orjson.loads(world.cloud.sent)["messages"] == body["messages"]
    assert (threading.get_ident() not in threads) == is_apart and len(threads) == 1


@pytest.mark.parametrize(("dialect", "name"), [("chat", "messages"), ("responses", "input")])
def test_there_are_as_many_messages_as_for_a_local_model(
    tmp_path: Path, dialect: str, name: str
) -> None:
    rows = [{"role": "user", "content": "a"}] * (MESSAGES_MAX + 1)
    world = World(tmp_path, [b"{}"])
    with pytest.raises(RequestError, match="20,001 and this server accepts 20,000"):
        asyncio.run(world.ask(dialect, {"model": "cloud", name: rows}, 1_000_000))
    assert world.cloud.sent == b""


@pytest.mark.parametrize("size", [100, 10_000_000])
def test_a_response_is_kept_before_its_client_can_read_its_end(tmp_path: Path, size: int) -> None:
    """Who has read the end may go on from it at once."""
    body = {"model": "cloud", "input": "Hi", "stream": True}
    world = World(tmp_path, [b"data: {}\n\n", ENDED[:20], ENDED[20:], b"data: [DONE]\n\n"])
    asyncio.run(world.ask("responses", body, size))
    assert [count for _, count in world.kept] == [0, 0, 1, 1, 1]
    world = World(tmp_path, [orjson.dumps(RESPONSE)])
    asyncio.run(world.ask("responses", body | {"stream": False}, size))
    assert [(piece, count) for piece, count in world.kept if not piece] == [(b"", 1)]
