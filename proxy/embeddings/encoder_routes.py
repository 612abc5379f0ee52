"""Answers /v1/embeddings and /v1/rerank with EMBEDDING_MODEL and RERANK_MODEL.

The models are in a worker of their own (`encoders`). What is asked and answered is read
and written in the threads of large bodies, where it is large. What was embedded and ranked is
counted and remembered once each, at the end of its reply.
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
from hearth.proxy.request.session_id import key_digest, session_of
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
    """Answers with vectors and scores. Owner: the event loop.

    Invariant: each request that was computed is counted and logged once, at its reply's end.
    """

    def __init__(self, settings: Settings, routes: AdminRoutes, encoders: Encoders | None) -> None:
        """Have the models that `settings` name listed; without `encoders` there are none."""
        self.models = encoders_of(settings) if encoders is not None else {}
        self._encoders = encoders
        self._metrics, self._requests = routes.metrics, routes.requests
        routes.encoders = self.listed
        known = [served_here(model.public) for model in self.models.values()]
        self._metrics.gateway.add_servers(known, is_cloud=False)
        registry = None if encoders is None else self._metrics.registry
        self._sums = [
            Counter(f"hearth_encoder_{name}", about, ("dialect",), registry=registry)
            for name, about in _SUMS.items()
        ]
        for counter in self._sums:
            for kind in KINDS:  # a series that appears at 1 has no rate
                counter.labels(kind)
        if registry is not None:
            registry.register(self)

    # ------------------------------------------------------------ names

    @property
    def names(self) -> ModelNames | None:
        """The names of EMBEDDING_MODEL; None = there is none."""
        found = self.models.get("embeddings")
        return None if found is None else found.names

    def model(self, kind: EncoderKind) -> EncoderNames:
        """Return the names of what answers. Raises: RequestError: a 404, as none is set."""
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
        """Raise RequestError where `name` is a model's that answers with no text."""
        for kind, model in self.models.items():
            if model.is_own(name):
                raise RequestError(
                    f"The model {name!r:.200} answers at /v1/{kind} only. Name one that answers "
                    "with text; GET /v1/models lists those first.",
                    code="unsupported_parameter",
                    param="model",
                )

    def check_local(self, kind: EncoderKind, local: str) -> None:
        """Raise RequestError where the local model of a LiteLLM config is not the one for it."""
        if kind not in self.models or self.models[kind].public != local:
            remedy = "Name one of another server that LITELLM_CONFIG lists"
            raise RequestError(
                f"The model {local!r:.200} is a local one that /v1/{kind} is not answered by. "
                f"{remedy}, or set {SETTINGS[kind]} to one that does it here.",
                code="unsupported_parameter",
                param="model",
            )

    def listed(self) -> dict[str, ListedGroup]:
        """Return what the list of models has of them."""
        facts = {} if self._encoders is None else self._encoders.facts
        return {
            model.public: ListedGroup("hearth", None, _told(kind, facts.get(kind)))
            for kind, model in self.models.items()
        }

    # ------------------------------------------------------------ answers

    async def answer(self, exchange: HttpExchange, kind: EncoderKind, body: ClientBody) -> int:
        """Answer a request whose model's name was checked; return how many tokens it was.

        Raises:
            RequestError: nothing was sent.
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
        exchange.hold(body.size)  # what the worker is sent is kept until it has answered
        found = Embedded("", b"", 0, [])
        if request.texts:
            assert self._encoders is not None
            work = self._encoders.embed(request.texts, request.dimensions, request.truncate)
            found = await exchange.while_connected(work)
        size = json_bytes_max(found, request.encoding)
        exchange.hold(size)
        name, seconds = body.fields.get("model") or model.public, awake_s() - began
        write = functools.partial(embeddings_json, found, request.encoding, model.public)
        if is_ollamas:
            write = functools.partial(ollama_json, exchange.path, found, name, seconds)
        parts = await exchange.while_connected(work_on_body(size, write))
        tokens = sum(found.tokens)
        try:
            await exchange.send_parts(200, parts, b"application/json")
        finally:
            self._ended(exchange, model, len(request.texts), tokens, began)
        return tokens

    async def _rerank(self, exchange: HttpExchange, model: EncoderNames, body: ClientBody) -> int:
        assert self._encoders is not None
        began = awake_s()
        reading = work_on_body(body.size, functools.partial(read_rerank, body.fields))
        request = await exchange.while_connected(reading)
        exchange.hold(body.size)  # as in _embed
        work = self._encoders.rerank(request.query, request.documents)
        found = await exchange.while_connected(work)
        answer = rerank_answer(found, request, model.public, exchange.request_id)
        try:
            await exchange.send_json(200, answer)
        finally:
            self._ended(exchange, model, len(request.documents), found.tokens, began)
        return found.tokens

    # ------------------------------------------------------------ figures

    def _ended(
        self, exchange: HttpExchange, model: EncoderNames, texts: int, tokens: int, began_at: float
    ) -> None:
        """Count a reply that was sent, or broke off, and write its line in the log.

        `began_at` is of `awake_s`.
        """
        exchange.is_counted = True
        wall_s = awake_s() - began_at
        for counter, value in zip(self._sums, (texts, tokens, wall_s), strict=True):
            counter.labels(model.kind).inc(value)
        error = exchange.broken_by
        outcome = outcome_elsewhere(200 if error is None else error.status, is_whole=error is None)
        served_by = served_here(model.public)
        self._metrics.ended(model.kind, outcome, served_by)
        key = key_digest(exchange.headers)
        speaker = session_of(exchange.headers, {}, key)
        ended = ANSWERED if error is None else error.code
        ended = CANCELLED if isinstance(error, ClientGone) else ended
        row = {
            "id": exchange.request_id,
            "dialect": model.kind,
            "session": speaker.label,
            "client": speaker.client_name,
            "ended": ended,
            "prompt": tokens,
            "wall_ms": round(wall_s * 1000),
            "served_by": served_by,
        }
        self._requests.record_encoded(row, key)
        log.info(
            "request id=%s dialect=%s served_by=%s texts=%d prompt=%d ended=%s wall_ms=%d",
            *(row["id"], model.kind, served_by, texts, tokens, ended, row["wall_ms"]),
        )

    def collect(self) -> Iterable[Metric]:
        """Yield what Prometheus is told of the worker that embeds and ranks."""
        assert self._encoders is not None
        state = GaugeMetricFamily(
            "hearth_encoder_process",
            "1 for the state that the process of EMBEDDING_MODEL and RERANK_MODEL is in.",
            labels=["state"],
        )
        for each in _STATES:
            state.add_metric([each], int(self._encoders.state == each))
        worker = self._encoders.worker
        about = "Requests that wait for it or are computed in it."
        return (
            state,
            GaugeMetricFamily("hearth_encoder_waiting", about, self._encoders.waiting),
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
    """Refuse the token ids of another model's tokenizer, whose vectors would mean nothing.

    A client that gives ids under a name of OpenAI's has made them with OpenAI's tokenizer.

    Raises:
        RequestError: a 400.
    """
    has_ids = any(type(row) is list for row in request.texts)
    if name and has_ids and not model.is_own(name):
        raise RequestError(
            f"input has token ids, and under the name {name!r:.200} they are of that model's "
            f"tokenizer, while {model.public!r} answers. Send texts (in LangChain "
            "check_embedding_ctx_length=False), or ids of its own tokenizer under its own name.",
            code="unsupported_parameter",
            param="input",
        )


def _told(kind: EncoderKind, facts: EncoderFacts | None) -> dict[str, Any]:
    """Return what the list of models says of one; its sizes are known once it was loaded."""
    told: dict[str, Any] = {
        "architecture": {"input_modalities": ["text"], "output_modalities": [kind]}
    }
    if facts is None:
        return told
    length = {"context_length": facts.tokens_max, "max_model_len": facts.tokens_max}
    meta = {"size": facts.weight_bytes, "architecture": facts.architecture}
    if facts.dimensions:
        meta |= {"n_embd": facts.dimensions, "pooling": facts.pooling}
    return told | length | {"meta": meta}
