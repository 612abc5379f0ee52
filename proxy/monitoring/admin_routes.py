"""Serves the routes about the server itself: health, models, cache, sessions, metrics.

A request for any other path gets a 404.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.ollama.routes import OllamaRoutes
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.http.http_exchange import HttpExchange, wrong_method
from hearth.proxy.monitoring.dashboard import DashboardFeed
from hearth.proxy.monitoring.metrics import CONTENT_TYPE, PATH, RequestMetrics, served_here
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.pool.worker_pool import ReportKind, WorkerPool, WorkerReports
from hearth.proxy.request.model_names import ListedGroup, ModelNames
from hearth.proxy.request.session_id import api_key_digest
from hearth.proxy.workers.remote_workers import RemoteWorker
from hearth.proxy.workers.supervisor import Supervisor, WorkerProcess
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import ModelFacts

_ITEMS: Final = "/input_items"

_TAKING: Final = {"ready", "unloaded"}  # states that accept requests, perhaps after loading
_UP_OR_DOWN: Final = {"ready", "dead", "restarting", "unreachable"}  # states after a first start

Methods = dict[str, Callable[[HttpExchange], Awaitable[None]]]  # HEAD is served like GET


class AdminRoutes:
    """Answers requests about the server itself. Owner: the event loop.

    Invariant: with several API keys, each key sees only its own sessions, requests and prompts.
    """

    def __init__(
        self,
        settings: Settings,
        version: str,
        supervisor: Supervisor,
        pool: WorkerPool,
        remote: Sequence[RemoteWorker] = (),
    ) -> None:
        """Raises: StartError: the model's name cannot be served."""
        self._version = version
        self._workers: list[WorkerProcess | RemoteWorker] = [*supervisor.workers, *remote]
        self._pool = pool
        self.names = ModelNames.of(settings)
        self.groups: Mapping[str, ListedGroup] = {}  # groups of a LiteLLM config
        self.encoders: Callable[[], Mapping[str, ListedGroup]] = (
            dict  # encoders such as EMBEDDING_MODEL
        )
        self.metrics = RequestMetrics(version, self.names.public)
        self.metrics.gateway.add_servers(map(served_here, self.names.adapters), is_cloud=False)
        directory = settings.kv_cache_dir / "responses" if settings.max_kv_size_gb != 0 else None
        self.stored = ResponseStore(directory=directory)
        self._table: dict[str, Methods] = {
            "/": {"GET": self._root},
            "/health": {"GET": self._health},
            "/health/ready": {"GET": self._ready},
            "/v1/models": {"GET": self._models},
            "/models": {"GET": self._models},
            "/v1/cache": {
                "GET": partial(self._ask_caches, "cache"),
                "DELETE": partial(self._ask_caches, "clear_cache"),
            },
            "/v1/doctor": {
                "GET": partial(self._ask_doctors, "doctor"),
                "POST": partial(self._ask_doctors, "check_again"),
            },
            "/v1/sessions": {"GET": self._sessions},
            PATH: {"GET": self._metrics},
        }
        model: Methods = {"GET": self._model}
        response: Methods = {"GET": self._response, "DELETE": self._delete_response}
        self._named: dict[str, Methods] = {  # path prefix before a name -> methods
            "/v1/models/": model,
            "/models/": model,
            "/v1/responses/": response,
            "/responses/": response,
            "/v1/sessions/": {"GET": self._session},
            "/v1/cache/pins/": {"DELETE": self._unpin},
            **({"/v1/cache/prompts/": {"GET": self._prompt}} if settings.serves_prompts else {}),
        }
        unload_s = settings.model_idle_unload_seconds
        self._ollama = OllamaRoutes(self.names, pool, unload_s, self._groups)
        self.requests = RecentRequests(self.metrics)
        self.feed = DashboardFeed(pool, self.health, self.requests)
        pool.count_unread = self.requests.record_unread

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer a request for a path of this module.

        Raises:
            RequestError: 404 or 405, or the route's refusal.
        """
        methods = self._methods(exchange.path)
        if not methods:
            text = f"{exchange.path!r:.120} is not served here."
            raise RequestError(text, status=404, code="not_found")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            raise wrong_method(exchange, ", ".join(methods).replace("GET", "GET, HEAD"))
        await handler(exchange)

    def _methods(self, path: str) -> Methods:
        """Return the methods of `path`; empty if it is not served here."""
        name = self._name(path)
        if not name:
            return self._table.get(path) or self._ollama.methods(path)
        prefix = path.removesuffix(name)
        if prefix.endswith("/responses/"):
            if name.endswith(_ITEMS):
                return {"GET": self._response_items}
            if "/" in name or name == "compact":
                return {}
        return self._named[prefix]

    def _name(self, path: str) -> str:
        """Return the rest of `path` after one of the prefixes in `_named`; "" if no prefix fits."""
        prefix = next(filter(path.startswith, self._named), path)
        return path[len(prefix) :]

    async def _root(self, exchange: HttpExchange) -> None:
        await exchange.send_json(200, {"name": "hearth", "version": self._version})

    async def _models(self, exchange: HttpExchange) -> None:
        groups, is_anthropic = self._groups(), exchange.is_anthropic
        listing = self.names.listing(self._facts_of, groups, is_anthropic=is_anthropic)
        await exchange.send_json(200, listing)

    def _groups(self) -> dict[str, ListedGroup]:
        """Return the groups behind names that no local text model has."""
        encoders = self.encoders()
        groups = {name: encoders.get(row.local or "", row) for name, row in self.groups.items()}
        return {**groups, **encoders}

    def _facts_of(self, target: str) -> ModelFacts | None:
        """Return the known facts of a target; an adapter has its model's facts."""
        return self._pool.facts_of(self.names.model_of(target))

    async def _model(self, exchange: HttpExchange) -> None:
        name, group = self.names.group(self._name(exchange.path), self._groups())
        facts, is_anthropic = (
            group.facts(self._facts_of),
            exchange.is_anthropic and not group.model_fields,
        )
        row = self.names.model_entry(name, facts, is_anthropic=is_anthropic, group=group)
        await exchange.send_json(200, row)

    async def _ask_caches(self, report_kind: ReportKind, exchange: HttpExchange) -> None:
        """Answer with a row for each worker: its report, or why it has none.

        Raises:
            RequestError: the cache was to be emptied, and no worker was ready to do so.
        """
        reports = await exchange.while_connected(
            self._pool.ask(report_kind, api_key=api_key_digest(exchange.headers))
        )
        if report_kind == "clear_cache" and not reports:
            raise Overloaded(
                "Nothing was emptied: no worker is ready. Send a request, which loads a model, and "
                "ask again; or stop the server and remove KV_CACHE_DIR."
            )
        totals = self.requests.totals(api_key_digest(exchange.headers))
        body = {"object": "cache", "totals": totals}
        await exchange.send_json(200, body | {"workers": self._worker_rows(reports)})

    async def _ask_doctors(self, report_kind: ReportKind, exchange: HttpExchange) -> None:
        """Answer with the findings of each worker's checks, which contain no prompts."""
        reports = await exchange.while_connected(self._pool.ask(report_kind))
        await exchange.send_json(200, {"object": "doctor", "workers": self._worker_rows(reports)})

    def _worker_rows(self, reports: WorkerReports) -> list[dict[str, Any]]:
        """Return a row for each worker: its report, or why it has none."""
        rows = []
        for worker in self._workers:
            row = reports.get(worker.worker_id)
            content = row if isinstance(row, dict) else {"error": str(row)}
            content = self._absent(worker) if row is None else content
            rows.append({"worker": worker.worker_id, **content})
        return rows

    async def _unpin(self, exchange: HttpExchange) -> None:
        """Have every worker that holds the pin release it."""
        pin_id = self._name(exchange.path)
        reports = await exchange.while_connected(
            self._pool.ask("unpin", pin_id, api_key_digest(exchange.headers))
        )
        _known(reports, f"No worker has a pin {pin_id!r:.80}; /v1/cache lists those they have.")
        await exchange.send_json(200, {"id": pin_id, "object": "cache.pin", "deleted": True})

    async def _prompt(self, exchange: HttpExchange) -> None:
        """Answer with the token ids of a recent prompt, from the worker that rendered it."""
        request_id = self._name(exchange.path)
        reports = await exchange.while_connected(
            self._pool.ask("prompt", request_id, api_key_digest(exchange.headers))
        )
        text = f"No worker remembers the prompt of {request_id!r:.80}; they keep recent ones only."
        row = next(iter(_known(reports, text).values()))
        await exchange.send_json(200, {"request_id": request_id, "ids": row["ids"]})

    async def _sessions(self, exchange: HttpExchange) -> None:
        """Answer with sessions, last requests, and the reasons of workers without a report."""
        api_key = api_key_digest(exchange.headers)
        reports = await exchange.while_connected(self._pool.ask("sessions", api_key=api_key))
        report_rows = self._worker_rows(reports)
        listing = {
            "object": "list",
            "sessions": [
                row | {"worker": report["worker"]}
                for report in report_rows
                for row in report.get("sessions", ())
            ],
            "recent": self.requests.recent(api_key),
            "errors": [report for report in report_rows if "sessions" not in report],
        }
        await exchange.send_json(200, listing)

    async def _session(self, exchange: HttpExchange) -> None:
        """Answer with the lines of one session, from every worker that knows it."""
        session = self._name(exchange.path)
        reports = await exchange.while_connected(
            self._pool.ask("session", session, api_key_digest(exchange.headers))
        )
        text = f"No worker knows the session {session!r:.80}; /v1/sessions lists those they know."
        is_known = any(isinstance(row, dict) for row in reports.values())
        if not is_known and len(reports) < len(self._workers):
            raise Overloaded(
                f"No worker that is ready knows the session {session!r:.80}, and one that is not "
                "may know it. Ask again when /health tells that all are."
            )
        lines = [
            line | {"worker": worker_id}
            for worker_id, row in _known(reports, text).items()
            for line in row["lines"]
        ]
        await exchange.send_json(200, {"session": session, "lines": lines})

    async def _response(self, exchange: HttpExchange) -> None:
        api_key, response_id = api_key_digest(exchange.headers), self._name(exchange.path)
        if (stream := exchange.query.get("stream", "false")) != "false":
            fields.refuse("stream", stream, "false: of a kept response no events are kept")
        await exchange.send_json(200, self.stored.response(api_key, response_id))

    async def _delete_response(self, exchange: HttpExchange) -> None:
        deleted = self.stored.delete(api_key_digest(exchange.headers), self._name(exchange.path))
        await exchange.send_json(200, deleted)

    async def _response_items(self, exchange: HttpExchange) -> None:
        response_id = self._name(exchange.path).removesuffix(_ITEMS)
        page = self.stored.items(api_key_digest(exchange.headers), response_id, exchange.query)
        await exchange.send_json(200, page)

    async def _health(self, exchange: HttpExchange) -> None:
        body = self.health()
        if exchange.is_trusted:
            body["queue"] = self._pool.queue(api_key_digest(exchange.headers))
            body["prefills"] = self._pool.prefills(api_key_digest(exchange.headers))
        await exchange.send_json(200, body)

    async def _ready(self, exchange: HttpExchange) -> None:
        """Answer a load balancer: the status is 503 while every request would wait for a model."""
        body = self.health()
        fields = {name: body[name] for name in ("ready", "free", "status")}
        await exchange.send_json(200 if body["ready"] else 503, fields)

    async def _metrics(self, exchange: HttpExchange) -> None:
        """Answer with sums over all API keys, as far as the workers report in time."""
        reports = await exchange.while_connected(self._pool.ask("cache"))
        text = self.metrics.text([worker.health_fields() for worker in self._workers], reports)
        await exchange.send_whole(200, text, CONTENT_TYPE)

    def health(self) -> dict[str, Any]:
        """Return the body of /health: "ok" only while each worker is ready, or unloaded if unused.

        `missing`, if present, says why no worker can load the default model.
        """
        rows = [worker.health_fields() for worker in self._workers]
        states = {row["state"] for row in rows}
        if states and states <= _TAKING:
            status = "ok"
        elif any(row["restarts"] for row in rows) or states & _UP_OR_DOWN:
            status = "degraded"
        else:
            status = "starting"
        missing = self._pool.host.why_missing()
        taking = _TAKING if self.names.others or not missing else {"ready"}
        return {
            "status": status,
            "ready": bool(states & taking),
            "free": sum(map(_free, rows)),
            "version": self._version,
            **({"missing": missing} if missing else {}),
            "workers": rows,
        }

    def _absent(self, worker: WorkerProcess | RemoteWorker) -> dict[str, str]:
        """Return the row of a worker that cannot be asked."""
        state = worker.health_fields()["state"]
        more = "/health tells its state."
        if state == "unloaded":
            missing = self._pool.host.why_missing()
            more = missing or "what it keeps is on disk, and the next request loads its model."
        return {"state": state, "error": f"This worker is not ready, it is {state}; {more}"}


def _free(row: Mapping[str, Any]) -> int:
    """Return how many more requests a worker takes before it refuses a request."""
    in_use = max(
        row["in_flight"], row["running"] + row["waiting"]
    )  # includes requests of other proxies
    return max(0, row["requests_max"] - in_use) if row["state"] == "ready" else 0


def _known(reports: WorkerReports, text: str) -> dict[int, dict[str, Any]]:
    """Return the reports of the workers that know the requested item.

    Raises:
        RequestError: 404 with `text` if no worker knows the item, or the reason if a worker
            that may know the item gave no report.
    """
    known = {worker_id: row for worker_id, row in reports.items() if isinstance(row, dict)}
    if known:
        return known
    failures = (
        row for row in reports.values() if isinstance(row, RequestError) and row.status != 404
    )
    raise next(failures, RequestError(text, status=404, code="not_found"))
