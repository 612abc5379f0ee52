"""Runs the proxy's app over fake worker processes, for a client that has the key."""

import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson

from hearth.proxy.app import ProxyApp
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.shared.settings import load_settings
from tests.helpers.proxy.fake_worker_pool import Bench, bench
from tests.helpers.proxy.proxy_app import Reply, asked

KEY = (b"x-api-key", b"k")
DEBUG = {"LOG_PROMPTS": "true", "PROXY_API_KEY": "k"}


class Front:
    """The edge over running workers, asked by a client that has the key."""

    def __init__(self, made: Bench, run_dir: str, environ: dict[str, str]) -> None:
        self.made = made
        settings = load_settings({"RUN_DIR": run_dir, "MAX_KV_SIZE_GB": "0", **environ}, None)
        routes = AdminRoutes(settings, "0", made.supervisor, made.pool)
        self._stopped: list[int] = []
        self.app = ProxyApp(settings, made.pool, routes)

    async def ask(
        self, method: str, path: str, *headers: tuple[bytes, bytes], body: bytes = b""
    ) -> Reply:
        return await self.open_ask(method, path, KEY, *headers, body=body)

    async def ask_as(
        self, key: tuple[bytes, bytes], method: str, path: str, body: bytes = b""
    ) -> Reply:
        """Ask as a client that has `key`, a header."""
        return await asked(self.app, method, path, key, body=body)

    async def open_ask(
        self, method: str, path: str, *headers: tuple[bytes, bytes], body: bytes = b""
    ) -> Reply:
        """Ask without the key, unless it is in `headers`."""
        return await asked(self.app, method, path, *headers, body=body)

    async def workers(self, method: str = "GET") -> list[dict[str, Any]]:
        reply = await self.ask(method, "/v1/cache")
        assert reply.status == 200
        assert reply.json["object"] == "cache"
        return list(reply.json["workers"])

    async def generate(self, script: str) -> tuple[str, int]:
        """Have a worker answer; return the request id as the client was told it, and its size."""
        body = orjson.dumps({"model": "claude-x", "input": script})
        reply = await self.ask("POST", "/v1/responses", body=body)
        assert reply.status == 200, reply.content
        return reply.headers["x-request-id"], reply.json["usage"]["input_tokens"]

    async def prompt(self, request_id: str) -> Reply:
        return await self.ask("GET", f"/v1/cache/prompts/{request_id}")

    def stop(self, number: int) -> None:
        """Have a worker hang, as one does in a long forward."""
        pid = self.made.supervisor.pids[number]
        os.kill(pid, signal.SIGSTOP)
        self._stopped.append(pid)

    def resume(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def front(count: int = 2, **environ: str) -> AsyncIterator[Front]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        async with bench(Path(name), count) as made:
            opened = Front(made, name, DEBUG | environ)
            try:
                yield opened
            finally:
                opened.resume()
