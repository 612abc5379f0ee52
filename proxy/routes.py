"""The routes that need no model: health and the list of models. Everything else is a 404."""

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote

from proxy.exchange import Exchange, wrong_method
from proxy.models import ModelNames
from proxy.pool import WorkerPool
from proxy.supervisor import Supervisor
from shared.config import Settings
from shared.errors import RequestError

_MODEL_PATHS: Final = ("/v1/models", "/models")


class Routes:
    """Answers what is asked about the server itself."""

    def __init__(
        self, settings: Settings, version: str, supervisor: Supervisor, pool: WorkerPool
    ) -> None:
        """Raises: StartError: the model's name cannot be served."""
        self._version = version
        self._supervisor = supervisor
        self._pool = pool
        self.names = ModelNames.of(settings)
        self._table: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/": self._root,
            "/health": self._health,
            "/v1/models": self._models,
            "/models": self._models,
        }

    async def serve(self, exchange: Exchange) -> None:
        """Answer a GET of ours.

        Raises:
            RequestError: 404 or 405.
        """
        handler = self._table.get(exchange.path)
        name = _model_name(exchange.path)
        if handler is None and name is None:
            text = f"{exchange.path!r:.120} is not served here."
            raise RequestError(text, status=404, code="not_found")
        if exchange.method not in ("GET", "HEAD"):
            raise wrong_method(exchange, "GET, HEAD")
        if handler is not None:
            await handler(exchange)
        else:
            row = self.names.row(self.names.check(name), self._pool.facts)
            await exchange.send_json(200, row)

    async def _root(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"name": "hearth", "version": self._version})

    async def _models(self, exchange: Exchange) -> None:
        rows = self.names.rows(self._pool.facts)
        first, last = rows[0]["id"], rows[-1]["id"]
        listing = {"object": "list", "data": rows, "has_more": False}
        await exchange.send_json(200, listing | {"first_id": first, "last_id": last})

    async def _health(self, exchange: Exchange) -> None:
        await exchange.send_json(200, self.health())

    def health(self) -> dict[str, Any]:
        """Return what /health says: "ok" only while every worker is ready."""
        rows = [worker.row() for worker in self._supervisor.workers]
        states = {row["state"] for row in rows}
        if states == {"ready"}:
            status = "ok"
        elif any(row["restarts"] for row in rows) or states & {"ready", "dead", "restarting"}:
            status = "degraded"
        else:
            status = "starting"
        return {"status": status, "version": self._version, "workers": rows}


def _model_name(path: str) -> str | None:
    for prefix in _MODEL_PATHS:
        if path.startswith(f"{prefix}/") and len(path) > len(prefix) + 1:
            return unquote(path[len(prefix) + 1 :])
    return None
