"""Serves Ollama's routes about models: what is there, what is loaded, and what is refused."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from hearth.proxy.api.ollama.ollama_models import running_row, shown, tags_row
from hearth.proxy.http.http_exchange import HttpExchange
from hearth.proxy.http.strict_json import read_object
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ListedGroup, ModelNames
from hearth.shared.errors import RequestError
from hearth.shared.version import VERSION

PREFIX: Final = "/api/"
OLLAMA_VERSION: Final = "0.32.0"  # whose API these routes follow: clients ask for a lowest one
_BLOBS: Final = "/api/blobs/"
_REMEDIES: Final = {  # of what is refused, by path
    "/api/pull": "Run `hearth pull` on this machine, and name the model in MODEL_PATH or MODELS.",
    "/api/push": "Nothing is sent from here to a registry.",
    "/api/create": "Name a model in MODEL_PATH or MODELS, and LoRA adapters in ADAPTERS.",
    "/api/copy": "To give a model another name add it to MODEL_ALIASES.",
    "/api/delete": "Run `hearth rm` on this machine.",
    _BLOBS: "Run `hearth pull` on this machine.",
}

Methods = dict[str, Callable[[HttpExchange], Awaitable[None]]]


class OllamaRoutes:
    """Answers what Ollama's clients ask about models. Owner: the event loop."""

    def __init__(
        self,
        names: ModelNames,
        pool: WorkerPool,
        unload_s: float,
        groups: Callable[[], Mapping[str, ListedGroup]],
    ) -> None:
        """`unload_s` as of ModelSwapper; `groups` gives who answers to names beside `names`."""
        self._names = names
        self._pool = pool
        self._unload_s = unload_s
        self._groups = groups
        self._table: dict[str, Methods] = {
            "/api/version": {"GET": self._version},
            "/api/tags": {"GET": self._tags},
            "/api/ps": {"GET": self._running},
            "/api/show": {"POST": self._show},
            "/api/delete": {"DELETE": _refused},
            **{path: {"POST": _refused} for path in _REMEDIES if path != "/api/delete"},
        }

    def methods(self, path: str) -> Methods:
        """Return what `path` is answered by; nothing where it is none of Ollama's."""
        return self._table.get(_BLOBS if path.startswith(_BLOBS) else path, {})

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.send_json(200, {"version": OLLAMA_VERSION, "hearth": VERSION})

    async def _tags(self, exchange: HttpExchange) -> None:
        groups = {name: ListedGroup("", self._names.target(name)) for name in self._names.listed}
        models = [self._model(name, row) for name, row in {**groups, **self._groups()}.items()]
        rows = [tags_row(model) for model in models if model is not None]
        await exchange.send_json(200, {"models": rows})

    async def _running(self, exchange: HttpExchange) -> None:
        links: dict[str, list[WorkerLink]] = {}
        for link in self._pool.links.values():
            if link.is_ready and link.heartbeat is not None and link.heartbeat.model is not None:
                links.setdefault(link.heartbeat.model.name, []).append(link)
        rows = [running_row(self._names, having, self._unload_s) for having in links.values()]
        await exchange.send_json(200, {"models": rows})

    async def _show(self, exchange: HttpExchange) -> None:
        """Tell of one model. Raises: RequestError: it is not served here."""
        body = await read_object(await exchange.read_body())
        name = self._names.named(body.get("model") or body.get("name"))
        _, group = self._names.group(name, self._groups())
        model = self._model(name, group)
        if model is None:
            raise RequestError(
                f"The model {name!r:.200} answers by the other APIs only: it is another server's, "
                "or ranks documents. GET /api/tags lists those that answer here.",
                status=404,
                code="model_not_found",
                param="model",
            )
        await exchange.send_json(200, shown(model))

    def _model(self, name: str, group: ListedGroup) -> dict[str, Any] | None:
        """Return the entry in /v1/models of a local model; None where Ollama has none such."""
        if group.told:
            kinds = group.told["architecture"]["output_modalities"]
            return self._names.row(name, None, group=group) if "embeddings" in kinds else None
        if group.local is None:
            return None
        return self._names.row(name, self._pool.facts_of(self._names.model_of(group.local)))


async def _refused(exchange: HttpExchange) -> Any:
    """Refuse to change what models there are. Raises: RequestError."""
    path = _BLOBS if exchange.path.startswith(_BLOBS) else exchange.path
    raise RequestError(
        f"{exchange.path:.80} is not served: no request changes what models this server has. "
        f"{_REMEDIES[path]}",
        code="unsupported_operation",
    )
