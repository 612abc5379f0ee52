"""Serves Ollama's routes about models: lists them, shows one, and refuses changes."""

import time
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, Final

from hearth.proxy.api.ollama.events import timestamp
from hearth.proxy.http.http_exchange import HttpExchange
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import LATEST, ListedGroup, ModelNames
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.version import VERSION

PREFIX: Final = "/api/"
OLLAMA_VERSION: Final = "0.32.0"  # version of the API of these routes; clients check it
_BLOBS: Final = "/api/blobs/"
_REMEDIES: Final = {  # what to do instead of a refused route, by path
    "/api/pull": "Run `hearth pull` on this machine, and name the model in MODEL_PATH or MODELS.",
    "/api/push": "Nothing is sent from here to a registry.",
    "/api/create": "Name a model in MODEL_PATH or MODELS, and LoRA adapters in ADAPTERS.",
    "/api/copy": "To give a model another name add it to MODEL_ALIASES.",
    "/api/delete": "Run `hearth rm` on this machine.",
    _BLOBS: "Run `hearth pull` on this machine.",
}
FOR_EVER_S: Final = 100 * 365 * 86_400.0  # expiry of a model that is never unloaded
_UNITS: Final = (("B", 10**9), ("M", 10**6), ("K", 10**3))
_BITS_RAW: Final = 15  # bits per parameter; a model with fewer bits is quantised

ModelEntry = Mapping[str, Any]  # entry of /v1/models; without figures before the model is loaded
Methods = dict[str, Callable[[HttpExchange], Awaitable[None]]]


class OllamaRoutes:
    """Answers the requests of Ollama's clients about models. Owner: the event loop."""

    def __init__(
        self,
        names: ModelNames,
        pool: WorkerPool,
        unload_s: float,
        groups: Callable[[], Mapping[str, ListedGroup]],
    ) -> None:
        """`unload_s` is as in ModelSwapper; `groups` returns the groups that `names` lacks."""
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
        """Return the handlers of `path` by HTTP method; {} if the path is not one of Ollama's."""
        return self._table.get(_BLOBS if path.startswith(_BLOBS) else path, {})

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.send_json(200, {"version": OLLAMA_VERSION, "hearth": VERSION})

    async def _tags(self, exchange: HttpExchange) -> None:
        groups = {name: ListedGroup("", self._names.target(name)) for name in self._names.listed}
        models = [self._model(name, group) for name, group in {**groups, **self._groups()}.items()]
        tags = [
            {
                "name": tagged(model["id"]),
                "model": tagged(model["id"]),
                "modified_at": timestamp(model["created"]),
                "size": model.get("meta", {}).get("size", 0),
                "digest": _digest(model["id"]),
                "details": _details(model),
                "capabilities": _capabilities(model),
            }
            for model in models
            if model is not None
        ]
        await exchange.send_json(200, {"models": tags})

    async def _running(self, exchange: HttpExchange) -> None:
        links: dict[str, list[WorkerLink]] = {}
        for link in self._pool.links.values():
            if link.is_ready and link.heartbeat is not None and link.heartbeat.model is not None:
                links.setdefault(link.heartbeat.model.name, []).append(link)
        running = [
            _running_entry(self._names, model_links, self._unload_s)
            for model_links in links.values()
        ]
        await exchange.send_json(200, {"models": running})

    async def _show(self, exchange: HttpExchange) -> None:
        """Send the details of one model. Raises: RequestError: the model is not served here."""
        body = (await exchange.read_object()).fields
        name = self._names.name_or_default(body.get("model") or body.get("name"))
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
        details = {
            "license": "",
            "modelfile": f"# Hearth's settings name this model.\nFROM {model['id']}\n",
            "parameters": "",
            "template": "",
            "details": _details(model),
            "model_info": _model_info(model),
            "capabilities": _capabilities(model),
            "modified_at": timestamp(model["created"]),
        }
        await exchange.send_json(200, details)

    def _model(self, name: str, group: ListedGroup) -> dict[str, Any] | None:
        """Return a local model's entry in /v1/models; None for a model that Ollama cannot have."""
        if (
            group.model_fields
            and "embeddings" in group.model_fields["architecture"]["output_modalities"]
        ):
            return self._names.model_entry(name, None, group=group)
        if group.model_fields or group.local is None:
            return None
        return self._names.model_entry(name, self._pool.facts_of(self._names.model_of(group.local)))


async def _refused(exchange: HttpExchange) -> Any:
    """Refuse to add, change or delete models. Raises: RequestError."""
    path = _BLOBS if exchange.path.startswith(_BLOBS) else exchange.path
    raise RequestError(
        f"{exchange.path:.80} is not served: no request changes what models this server has. "
        f"{_REMEDIES[path]}",
        code="unsupported_operation",
    )


# ---------------------------------------------------------------- fields of a model


def _capabilities(model: ModelEntry) -> list[str]:
    """Return what a model can do; every text model can call tools, if need be by a prompt."""
    architecture = model.get("architecture", {})
    if "embeddings" in architecture.get("output_modalities", ()):
        return ["embedding"]
    thinks = model.get("thinking", {}).get("default", "never") != "never"
    sees = "image" in architecture.get("input_modalities", ())
    return ["completion", "tools", *["thinking"] * thinks, *["vision"] * sees]


def tagged(name: str) -> str:
    """Return `name` with a tag, which Ollama's lists have and clients expect."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _running_entry(names: ModelNames, links: list[WorkerLink], unload_s: float) -> dict[str, Any]:
    """Return the entry in /api/ps of the model that the workers of `links` have loaded."""
    heartbeats = [link.heartbeat for link in links]
    facts = next(heartbeat.model for heartbeat in heartbeats if heartbeat is not None)
    assert facts is not None, [link.worker_id for link in links]
    size = sum(heartbeat.active_bytes for heartbeat in heartbeats if heartbeat is not None)
    idle_s = awake_s() - max(link.uses.at for link in links)
    left_s = max(0.0, unload_s - idle_s) if unload_s else FOR_EVER_S
    return {
        "name": tagged(facts.name),
        "model": tagged(facts.name),
        "size": size,
        "digest": _digest(facts.name),
        "details": _details(names.model_entry(facts.name, facts)),
        "expires_at": timestamp(time.time() + left_s),
        "size_vram": 0 if facts.backend == "cpu" else size,
        "context_length": facts.context_tokens,
    }


def _digest(name: str) -> str:
    """Return a stable id in place of the digest of a model's files, which is never computed."""
    return sha256(name.encode()).hexdigest()


def _details(model: ModelEntry) -> dict[str, Any]:
    meta = model.get("meta", {})
    family, count = meta.get("architecture", ""), meta.get("n_params", 0)
    sizes = (f"{count / size:.1f}{unit}" for unit, size in _UNITS if count >= size)
    level = ""  # bits per parameter, in a name like Ollama's
    if count:
        bits = 8 * meta.get("size", 0) / count
        raw = "F32" if bits > 2 * _BITS_RAW else "BF16"
        level = raw if bits >= _BITS_RAW else f"Q{max(1, int(bits))}"
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": next(sizes, str(count or "")),
        "quantization_level": level,
    }


def _model_info(model: ModelEntry) -> dict[str, Any]:
    """Return the known figures of a model under their names in a GGUF file."""
    meta = model.get("meta", {})
    family = meta.get("architecture", "")
    figures = {
        "general.architecture": family,
        "general.parameter_count": meta.get("n_params"),
        f"{family}.context_length": model.get("context_length"),
        f"{family}.embedding_length": meta.get("n_embd"),
    }
    known = {name: figure for name, figure in figures.items() if family and figure}
    return {"general.basename": model["id"]} | known
