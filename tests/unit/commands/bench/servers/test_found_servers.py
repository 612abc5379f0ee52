"""Servers of others are found by what only they answer, and named by URL without a secret."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st

from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.found_servers import (
    BY_URL,
    SIGNS,
    PortSign,
    found_servers,
    server_of_url,
    version_of,
)

pytestmark = pytest.mark.process


async def serving(path: str, answer: Mapping[str, Any]) -> TestServer:
    async def tell(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get(path, tell)
    server = TestServer(app)
    await server.start_server()
    return server


def test_a_server_is_found_on_its_port_by_its_answer_alone() -> None:
    async def run() -> list[Server]:
        server = await serving("/api/version", {"version": "0.32.1"})
        assert server.port is not None
        signs = [
            PortSign("ollama", server.port, "/api/version", "version"),
            PortSign("lm-studio", server.port, "/api/v0/models", "data"),  # 404
            PortSign("llama-server", server.port, "/api/version", "build_info"),  # another's
            PortSign("nobody", 1, "/", "x"),
        ]
        try:
            return await found_servers(signs)
        finally:
            await server.close()

    (found,) = asyncio.run(run())
    assert found.name == "ollama" and found.url.startswith("http://127.0.0.1:")
    assert found.notes == (BY_URL,)


@pytest.mark.parametrize(
    ("path", "answer", "version"),
    [
        ("/api/version", {"version": "0.32.1"}, "0.32.1"),
        ("/props", {"default_generation_settings": {}, "build_info": "b7"}, "b7"),
        ("/health", {"status": "ok", "version": "1.2"}, "1.2"),
        ("/health", {"status": "ok"}, "not known"),
        ("/health", ["ok"], "not known"),
    ],
)
def test_a_server_by_url_tells_its_version_where_it_does(
    path: str, answer: Mapping[str, Any], version: str
) -> None:
    async def run() -> str:
        server = await serving(path, answer)
        try:
            return await version_of(Server("mine", url=f"http://127.0.0.1:{server.port}"))
        finally:
            await server.close()

    assert asyncio.run(run()) == version


def test_servers_are_named_by_url_and_by_the_model_of_many() -> None:
    mine = server_of_url("mine=http://h:1/v1/")
    assert (mine.name, mine.url, mine.model) == ("mine", "http://h:1", "")
    other = server_of_url("ollama=http://127.0.0.1:11434#qwen3:8b")
    assert (other.url, other.model) == ("http://127.0.0.1:11434", "qwen3:8b")
    assert len({sign.port for sign in SIGNS}) == len(SIGNS)


@pytest.mark.parametrize("text", ["http://h:1", "mine=", "=http://h", "mine=h:1", "mine=ftp://h"])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=URL"):
        server_of_url(text)


def test_a_key_in_a_url_is_refused_without_being_said() -> None:
    with pytest.raises(ValueError) as caught:
        server_of_url("mine=http://me:secret@h:1")
    assert "secret" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_a_server_or_refused(text: str) -> None:
    try:
        server = server_of_url(text)
    except ValueError:
        return
    assert server.name and server.url.startswith("http")
