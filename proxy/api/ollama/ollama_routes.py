"""Serves Ollama's routes about models: what is there, what is loaded, and what is refused."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from hearth.proxy.api.ollama.ollama_models import running_row, shown, tags_row
from hearth.proxy.http.http_exchange import HttpExchange
from hearth.proxy.http.strict_json import read_object
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ListedGroup, ModelNames, loose_name, loose_names
from hearth.shared.errors import RequestError
from hearth.shared.version import VERSION
from hearth.shared.wire_messages import ModelFacts

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
        """`unload_s` as of ModelSwapper; `groups` gives the names of a LiteLLM config."""
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
        since_s = self._names.since
        local = {name: group.local for name, group in self._groups().items()}
        targets = {name: self._names.target(name) for name in self._names.listed}
        targets |= {name: target for name, target in local.items() if target is not None}
        rows = [tags_row(name, self._facts_of(target), since_s) for name, target in targets.items()]
        await exchange.send_json(200, {"models": rows})

    async def _running(self, exchange: HttpExchange) -> None:
        links: dict[str, list[WorkerLink]] = {}
        for link in self._pool.links.values():
            if link.is_ready and link.heartbeat is not None and link.heartbeat.model is not None:
                links.setdefault(link.heartbeat.model.name, []).append(link)
        rows = [running_row(having, self._unload_s) for having in links.values()]
        await exchange.send_json(200, {"models": rows})

    async def _show(self, exchange: HttpExchange) -> None:
        """Tell of one model. Raises: RequestError: it is not served here."""
        body = await read_object(await exchange.read_body())
        name = self._names.named(body.get("model") or body.get("name"))
        facts = self._facts_of(self._target(name))
        await exchange.send_json(200, shown(name, facts, self._names.since))

    def _target(self, name: str) -> str:
        groups = self._groups()
        group = groups.get(name)
        if group is None and self._names.find_exact(name) is None:
            group = loose_names(groups).get(loose_name(name))
        if group is not None and group.local is not None:
            return group.local
        return self._names.target(self._names.check(name, groups))

    def _facts_of(self, target: str) -> ModelFacts | None:
        return self._pool.facts_of(self._names.model_of(target))


async def _refused(exchange: HttpExchange) -> Any:
    """Refuse to change what models there are. Raises: RequestError."""
    path = _BLOBS if exchange.path.startswith(_BLOBS) else exchange.path
    raise RequestError(
        f"{exchange.path:.80} is not served: no request changes what models this server has. "
        f"{_REMEDIES[path]}",
        code="unsupported_operation",
    )
