"""Answers /v1/embeddings and /v1/rerank with EMBEDDING_MODEL and RERANK_MODEL.

The models run in a separate worker (`encoders`). Large bodies are parsed and serialised in
threads. Each request is counted and recorded once, at the end of its reply.
"""

import functools
import logging
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hearth.proxy.embeddings.encoder_bodies import (
    OLLAMA_PATHS,
    EmbeddingRequest,
    embeddings_json,
    json_bytes_max,
    ollama_json,
    read_embedding,
    read_ollama,
    read_rerank,
    rerank_answer,
)
from hearth.proxy.embeddings.encoders import Encoders
from hearth.proxy.http.http_exchange import (
    SERVED_BY_HEADER,
    ClientBody,
    ClientGone,
    HttpExchange,
    work_on_body,
)
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.metrics import ANSWERED, CANCELLED, outcome_elsewhere, served_here
from hearth.proxy.request.encoder_names import (
    KINDS,
    SETTINGS,
    EncoderKind,
    EncoderNames,
    encoders_of,
)
from hearth.proxy.request.model_names import ListedGroup, ModelNames
from hearth.proxy.request.session_id import api_key_digest, session_of
from hearth.shared.errors import RequestError
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Embedded, EncoderFacts

log = logging.getLogger(__name__)

_STATES: Final = ("unloaded", "loading", "ready")
_SUMS: Final = {
    "texts": "Texts that were embedded, or documents that were ranked.",
    "tokens": "Tokens of them.",
    "seconds": "From the request to the end of its reply.",
}


ENCODER_PATHS: Final[dict[str, EncoderKind]] = {
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    **dict.fromkeys(OLLAMA_PATHS, "embeddings"),
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}


class EncoderRoutes:
    """Answers requests with vectors and scores. Owner: the event loop.

    Invariant: each computed request is counted and logged once, at the end of its reply.
    """

    def __init__(self, settings: Settings, routes: AdminRoutes, encoders: Encoders | None) -> None:
        """Add the models of `settings` to the list of models; without `encoders` add none."""
        self.models = encoders_of(settings) if encoders is not None else {}
        self._encoders = encoders
        self._metrics, self._requests = routes.metrics, routes.requests
        routes.encoders = self.listed
        known = [served_here(model.public) for model in self.models.values()]
        self._metrics.gateway.add_servers(known, is_cloud=False)
        registry = None if encoders is None else self._metrics.registry
        self._sums = [
            Counter(f"hearth_encoder_{name}", description, ("dialect",), registry=registry)
            for name, description in _SUMS.items()
        ]
        for counter in self._sums:
            for kind in KINDS:  # a series that begins at 1 has no rate
                counter.labels(kind)
        if registry is not None:
            registry.register(self)

    # ------------------------------------------------------------ names

    @property
    def names(self) -> ModelNames | None:
        """The names of EMBEDDING_MODEL, or None if it is not set."""
        found = self.models.get("embeddings")
        return None if found is None else found.names

    def model(self, kind: EncoderKind) -> EncoderNames:
        """Return the names of the model of this kind. Raises: RequestError: 404 if none is set."""
        found = self.models.get(kind)
        if found is None:
            setting = SETTINGS[kind]
            raise RequestError(
                f"/v1/{kind} is not served here: {setting} is empty. Set it to a model, as "
                "docs/embeddings.md tells, and start Hearth again.",
                status=404,
                code="model_not_found",
            )
        return found

    def refuse_text(self, name: str) -> None:
        """Raise RequestError if `name` is a model that embeds or ranks."""
        for kind, model in self.models.items():
            if model.is_own(name):
                raise RequestError(
                    f"The model {name!r:.200} answers at /v1/{kind} only. Name one that answers "
                    "with text; GET /v1/models lists those first.",
                    code="unsupported_parameter",
                    param="model",
                )

    def check_local(self, kind: EncoderKind, local: str) -> None:
        """Raise RequestError unless `local`, from a LiteLLM config, is the model of this kind."""
        if kind not in self.models or self.models[kind].public != local:
            remedy = "Name one of another server that LITELLM_CONFIG lists"
            raise RequestError(
                f"The model {local!r:.200} is a local one that /v1/{kind} is not answered by. "
                f"{remedy}, or set {SETTINGS[kind]} to one that does it here.",
                code="unsupported_parameter",
                param="model",
            )

    def listed(self) -> dict[str, ListedGroup]:
        """Return the entries for the list of models, by public name."""
        facts = {} if self._encoders is None else self._encoders.facts
        return {
            model.public: ListedGroup("hearth", None, _listing(kind, facts.get(kind)))
            for kind, model in self.models.items()
        }

    # ------------------------------------------------------------ answers

    async def answer(self, exchange: HttpExchange, kind: EncoderKind, body: ClientBody) -> int:
        """Answer a request whose model name was checked; return its token count.

        Raises:
            RequestError: the request failed before anything was sent.
        """
        model = self.model(kind)
        answer = self._embed if kind == "embeddings" else self._rerank
        exchange.reply_headers.append((SERVED_BY_HEADER, served_here(model.public).encode()))
        return await answer(exchange, model, body)

    async def _embed(self, exchange: HttpExchange, model: EncoderNames, body: ClientBody) -> int:
        began = awake_s()
        is_ollamas = exchange.path in OLLAMA_PATHS
        read = functools.partial(read_ollama, exchange.path)
        reader = functools.partial(read if is_ollamas else read_embedding, body.fields)
        request = await exchange.while_connected(work_on_body(body.size, reader))
        _check_ids(request, model, body.fields.get("model"))
        exchange.hold(body.size)  # the input stays in memory until the worker has answered
        embedded = Embedded("", b"", 0, [])
        if request.texts:
            assert self._encoders is not None
            work = self._encoders.embed(request.texts, request.dimensions, request.truncate)
            embedded = await exchange.while_connected(work)
        size = json_bytes_max(embedded, request.encoding)
        exchange.hold(size)
        name, seconds = body.fields.get("model") or model.public, awake_s() - began
        write = functools.partial(embeddings_json, embedded, request.encoding, model.public)
        if is_ollamas:
            write = functools.partial(ollama_json, exchange.path, embedded, name, seconds)
        parts = await exchange.while_connected(work_on_body(size, write))
        tokens = sum(embedded.tokens)
        try:
            await exchange.send_parts(200, parts, b"application/json")
        finally:
            self._record_end(exchange, model, len(request.texts), tokens, began)
        return tokens

    async def _rerank(self, exchange: HttpExchange, model: EncoderNames, body: ClientBody) -> int:
        assert self._encoders is not None
        began = awake_s()
        reading = work_on_body(body.size, functools.partial(read_rerank, body.fields))
        request = await exchange.while_connected(reading)
        exchange.hold(body.size)  # as in _embed
        work = self._encoders.rerank(request.query, request.documents)
        reranked = await exchange.while_connected(work)
        answer = rerank_answer(reranked, request, model.public, exchange.request_id)
        try:
            await exchange.send_json(200, answer)
        finally:
            self._record_end(exchange, model, len(request.documents), reranked.tokens, began)
        return reranked.tokens

    # ------------------------------------------------------------ figures

    def _record_end(
        self, exchange: HttpExchange, model: EncoderNames, texts: int, tokens: int, began_at: float
    ) -> None:
        """Count and log a reply that ended or broke off; `began_at` is a time of `awake_s`."""
        exchange.is_counted = True
        wall_s = awake_s() - began_at
        for counter, value in zip(self._sums, (texts, tokens, wall_s), strict=True):
            counter.labels(model.kind).inc(value)
        error = exchange.broken_by
        outcome = outcome_elsewhere(200 if error is None else error.status, is_whole=error is None)
        served_by = served_here(model.public)
        self._metrics.ended(model.kind, outcome, served_by)
        api_key = api_key_digest(exchange.headers)
        speaker = session_of(exchange.headers, {}, api_key)
        ended = ANSWERED if error is None else error.code
        ended = CANCELLED if isinstance(error, ClientGone) else ended
        entry = {
            "id": exchange.request_id,
            "dialect": model.kind,
            "session": speaker.label,
            "client": speaker.client_name,
            "ended": ended,
            "prompt": tokens,
            "wall_ms": round(wall_s * 1000),
            "served_by": served_by,
        }
        self._requests.record_encoded(entry, api_key)
        log.info(
            "request id=%s dialect=%s served_by=%s texts=%d prompt=%d ended=%s wall_ms=%d",
            *(entry["id"], model.kind, served_by, texts, tokens, ended, entry["wall_ms"]),
        )

    def collect(self) -> Iterable[Metric]:
        """Return Prometheus metrics of the worker that embeds and ranks."""
        assert self._encoders is not None
        state = GaugeMetricFamily(
            "hearth_encoder_process",
            "1 for the state that the process of EMBEDDING_MODEL and RERANK_MODEL is in.",
            labels=["state"],
        )
        for state_name in _STATES:
            state.add_metric([state_name], int(self._encoders.state == state_name))
        worker = self._encoders.worker
        description = "Requests that wait for it or are computed in it."
        return (
            state,
            GaugeMetricFamily("hearth_encoder_waiting", description, self._encoders.waiting),
            CounterMetricFamily(
                "hearth_encoder_process_starts", "Starts of the process.", worker.starts
            ),
            CounterMetricFamily(
                "hearth_encoder_process_deaths",
                "Ends of the process that nobody asked for.",
                worker.restarts,
            ),
        )


def _check_ids(request: EmbeddingRequest, model: EncoderNames, name: Any) -> None:
    """Refuse token ids of another model's tokenizer, as their vectors would be meaningless.

    A client that sends ids under an OpenAI model's name has made them with OpenAI's tokenizer.

    Raises:
        RequestError: 400.
    """
    has_ids = any(type(text) is list for text in request.texts)
    if name and has_ids and not model.is_own(name):
        raise RequestError(
            f"input has token ids, and under the name {name!r:.200} they are of that model's "
            f"tokenizer, while {model.public!r} answers. Send texts (in LangChain "
            "check_embedding_ctx_length=False), or ids of its own tokenizer under its own name.",
            code="unsupported_parameter",
            param="input",
        )


def _listing(kind: EncoderKind, facts: EncoderFacts | None) -> dict[str, Any]:
    """Return the listed details of a model; before the model is loaded, its sizes are unknown."""
    details: dict[str, Any] = {
        "architecture": {"input_modalities": ["text"], "output_modalities": [kind]}
    }
    if facts is None:
        return details
    length = {"context_length": facts.tokens_max, "max_model_len": facts.tokens_max}
    meta = {"size": facts.weight_bytes, "architecture": facts.architecture}
    if facts.dimensions:
        meta |= {"n_embd": facts.dimensions, "pooling": facts.pooling}
    return details | length | {"meta": meta}
