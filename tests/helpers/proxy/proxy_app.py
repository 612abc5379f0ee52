"""Builds the proxy's app without a server around it and asks it, in process or over a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlencode

import orjson
import uvicorn

from hearth.proxy.app import ProxyApp
from hearth.proxy.http.http1_protocol import ConnectionSlots, Http1Protocol
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.workers.supervisor import Supervisor
from hearth.shared.settings import Settings, load_settings
from tests.helpers.proxy.fake_worker_pool import pool_without_swaps

HOST = (b"host", b"127.0.0.1:4000")


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""

    @property
    def json(self) -> Any:
        return orjson.loads(self.content)


def app_of(
    tmp_path: Any,
    places: ConnectionSlots | None = None,
    encoders: Any = None,
    **environ: str,
) -> ProxyApp:
    settings: Settings = load_settings(
        {"RUN_DIR": str(tmp_path), "MAX_KV_SIZE_GB": "0", **environ}, None
    )
    pool = pool_without_swaps()
    supervisor = Supervisor(["true"], 1, tmp_path, pool, {})
    routes = AdminRoutes(settings, "0", supervisor, pool)
    return ProxyApp(settings, pool, routes, places, encoders=encoders)


def ask(edge: ProxyApp, *request: Any, **more: Any) -> Reply:
    """Send one request through `edge` and return the reply."""
    return asyncio.run(asked(edge, *request, **more))


def sign_in(edge: ProxyApp, path: str, key: str, *headers: tuple[bytes, bytes]) -> Reply:
    """Send the form of a page's sign-in."""
    body = urlencode({"key": key}).encode()
    return ask(edge, "POST", path, (b"content-length", b"%d" % len(body)), *headers, body=body)


def cookie_of(reply: Reply) -> tuple[bytes, bytes]:
    """Return the header that a browser sends back after a sign-in."""
    return (b"cookie", reply.headers["set-cookie"].partition(";")[0].encode())


async def asked(
    edge: ProxyApp,
    method: str = "GET",
    path: str = "/v1/models",
    *headers: tuple[bytes, bytes],
    body: bytes = b"",
    host: tuple[bytes, bytes] | None = HOST,
    query: bytes = b"",
    gone: asyncio.Event | None = None,
) -> Reply:
    """Return the reply to a client that leaves once `gone` is set; a part of the reply sets it."""
    reply = Reply()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            reply.content += message["body"]
            if gone is not None and reply.content:
                gone.set()

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "scheme": "http",
        "headers": [*([host] if host else []), *headers],
    }
    await edge(scope, receive, send)
    return reply


@contextlib.asynccontextmanager
async def serving(
    edge: ProxyApp, told: ProxyApp | None = None, **options: Any
) -> AsyncIterator[int]:
    """Serve `edge` as hearth.proxy.main does, and give the port.

    `told` is what refuses for it, where `edge` is no ProxyApp.
    """
    told = edge if isinstance(edge, ProxyApp) else told
    protocol = partial(Http1Protocol, ConnectionSlots(), lambda why, _: ([], str(why).encode()))
    if told is not None:
        protocol = partial(Http1Protocol, told.slots, told.refuse_unread)
    config = uvicorn.Config(
        edge,
        http=protocol,  # type: ignore[arg-type]
        port=0,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        **options,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
        if task.done():
            await task  # raises why it did not start
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
