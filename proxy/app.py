"""Serves every HTTP request as the outermost ASGI app: checks it, parses it, and dispatches it.

Every request passes `ProxyApp`, which checks Host, Origin, API key, path, body size and the body
itself before a worker gets anything. Refusals are written in the client's dialect.
"""

import contextlib
import logging
import uuid
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, cast

import orjson

from hearth.proxy.api import prefill_endpoint, tokenize_endpoints
from hearth.proxy.api.dialects import ANSWER_PATHS, COUNT_PATHS, DIALECTS
from hearth.proxy.api.error_texts import error_headers
from hearth.proxy.api.ollama.routes import PREFIX as OLLAMA_PREFIX
from hearth.proxy.chat_page.chat_page_routes import ChatPage
from hearth.proxy.embeddings.encoder_routes import ENCODER_PATHS, EncoderRoutes
from hearth.proxy.embeddings.encoders import Encoders
from hearth.proxy.gateway.cloud_bodies import CloudDialect
from hearth.proxy.gateway.gateway import FALLBACK_HEADER, Gateway, GatewayCall
from hearth.proxy.gateway.local_accounts import LocalAccount
from hearth.proxy.gateway.routing_table import Deployment
from hearth.proxy.http.api_keys import ApiKeyCheck, ClientKeys
from hearth.proxy.http.browser_pages import BrowserSignIns
from hearth.proxy.http.http1_protocol import ConnectionSlots
from hearth.proxy.http.http_exchange import (
    SERVED_BY_HEADER,
    BodyBudget,
    ClientBody,
    ClientGone,
    HttpExchange,
    RawHeaders,
    Receive,
    Scope,
    Send,
    wrong_method,
)
from hearth.proxy.http.origin_rules import OriginRules
from hearth.proxy.local_answers import CACHE_HEADER, LocalAnswers
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.dashboard import Dashboard
from hearth.proxy.monitoring.metrics import PREFILL
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.encoder_names import EncoderKind
from hearth.proxy.request.parsed_request import Dialect
from hearth.proxy.request.session_id import api_key_digest
from hearth.proxy.workers.keep_awake import KeepAwake
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.settings import Settings

log = logging.getLogger(__name__)

_OWN: Final = (prefill_endpoint.PATH, *tokenize_endpoints.PATHS)  # local models only
_OF_MODELS: Final = frozenset((*ANSWER_PATHS, *COUNT_PATHS, *_OWN, *ENCODER_PATHS))
# The dialect or kind of each path, by its name in the metrics.
_COUNTED: Final = {**ANSWER_PATHS, **ENCODER_PATHS, prefill_endpoint.PATH: PREFILL}
_OPEN_PATHS: Final = ("/health", "/health/ready")  # paths that need no API key
HEADERS_MAX: Final = 100
_ID_HEADERS: Final = (b"x-request-id", b"request-id")  # read by OpenAI's SDK and by Anthropic's
_EXPOSED: Final = b", ".join(
    (b"x-request-id", b"retry-after", CACHE_HEADER, SERVED_BY_HEADER, FALLBACK_HEADER)
)
_CORS_METHODS: Final = b"GET, POST, DELETE, OPTIONS"


class ProxyApp:
    """Checks and dispatches every request: the ASGI app that the server runs.

    Owner: the event loop. Invariant: each request that a worker admitted is counted and logged
    once, at its end. A refusal has the form of the client's dialect.
    """

    def __init__(
        self,
        settings: Settings,
        pool: WorkerPool,
        routes: AdminRoutes,
        slots: ConnectionSlots | None = None,
        gateway: Gateway | None = None,
        encoders: Encoders | None = None,
    ) -> None:
        """`slots` are the listener's. Without a `gateway`, only local models answer.

        `encoders` has the worker of EMBEDDING_MODEL and RERANK_MODEL; None = neither is set.
        """
        self._gateway = gateway
        self._origins = OriginRules(
            settings.proxy_host, settings.cors_origins, settings.allowed_hosts
        )
        own = None if gateway is None else gateway.accounts.keys
        self._keys: ClientKeys = own or ApiKeyCheck(settings.api_keys)
        self._has_keys = own is not None or bool(settings.api_keys)
        self._names = routes.names
        self.metrics = routes.metrics
        self.local = LocalAnswers(settings, pool, routes)
        self.routes = routes
        self.encoders = EncoderRoutes(settings, routes, encoders)
        self.body_budget = BodyBudget()
        sign_ins = BrowserSignIns(settings.proxy_port, self._keys)
        self.dashboard = Dashboard(routes.feed, sign_ins)
        self.chat_page = ChatPage(sign_ins)
        self.keep_awake = KeepAwake()
        self.slots = ConnectionSlots() if slots is None else slots
        self.metrics.watch_connections(self.slots)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, self.body_budget)
        exchange.reply_headers += _id_headers(exchange.request_id)
        try:
            await self._check_caller(exchange)
        except RequestError as error:
            await self._refuse(exchange, error)
        except Exception:
            log.exception("request failed by a bug path=%.80r", exchange.path)
            bug = "The proxy failed at this request; its log says where."
            await self._refuse(exchange, RequestError(bug, status=500, code="internal_error"))
        finally:
            exchange.end()

    async def _refuse(self, exchange: HttpExchange, error: RequestError) -> None:
        exchange.counting.close()
        if not exchange.is_counted:
            self.metrics.refused(_COUNTED.get(exchange.path), error)
            if exchange.is_trusted:  # refusals are counted for accepted keys only
                self.routes.requests.refused(error, api_key_digest(exchange.headers))
        if exchange.has_started or isinstance(error, ClientGone):
            return
        log.info(
            "refused id=%s path=%.80r status=%d code=%s",
            exchange.request_id,
            exchange.path,
            error.status,
            error.code,
        )
        dialect = ANSWER_PATHS.get(exchange.path) or COUNT_PATHS.get(exchange.path) or "chat"
        if exchange.path.startswith(OLLAMA_PREFIX):
            dialect = "ollama_chat"
        elif exchange.is_anthropic:
            dialect = "messages"
        body = DIALECTS[dialect].error_body(error, exchange.request_id)
        await exchange.drain()
        await exchange.send_json(error.status, body, error_headers(error))

    def refuse_unread(self, error: RequestError, is_anthropic: bool) -> tuple[RawHeaders, bytes]:
        """Return the headers and body of a refusal, after which the connection is closed."""
        request_id = uuid.uuid4().hex
        log.info("refused id=%s status=%d code=%s", request_id, error.status, error.code)
        api = DIALECTS["messages" if is_anthropic else "chat"]
        body = orjson.dumps(api.error_body(error, request_id))
        return [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *_id_headers(request_id),
        ], body

    async def _check_caller(self, exchange: HttpExchange) -> None:
        """Check connection slots, headers, Host, Origin and API key, then dispatch the request.

        Raises:
            RequestError: a check failed, or the request is refused later.
        """
        if exchange.path not in _OPEN_PATHS and self.slots.are_full:
            raise Overloaded(
                f"{self.slots.count_max:,} connections are amid requests, and this server serves "
                "no more at once. Try again in a few seconds."
            )
        if len(exchange.raw_headers) > HEADERS_MAX:
            raise RequestError(
                f"The request has {len(exchange.raw_headers)} headers and this server accepts "
                f"{HEADERS_MAX}. Send fewer.",
                status=431,
                code="too_many_headers",
            )
        hosts = [value.decode("latin-1") for name, value in exchange.raw_headers if name == b"host"]
        # Pages and their calls may come without a key in the headers: the browser sends a cookie.
        page = next(
            (page for page in (self.dashboard, self.chat_page) if page.serves(exchange)), None
        )
        is_open = exchange.path in _OPEN_PATHS or page is not None or self.chat_page.calls(exchange)
        self._origins.check_host(hosts, is_key_needed=self._has_keys and not is_open)
        origin = self._origins.check_origin(
            exchange.headers, exchange.scope.get("scheme", "http"), exchange.method
        )
        exchange.listed_origin = origin
        if origin is not None:
            exchange.reply_headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]
            if exchange.method == "OPTIONS":
                await _preflight(exchange)
                return
        if page is not None:
            await page.serve(exchange)  # the page checks keys and cookies itself
            return
        if self.chat_page.calls(exchange):
            self.chat_page.take_call(exchange)
        try:
            await self._authenticate(exchange)
        except RequestError:
            if exchange.path not in _OPEN_PATHS:
                raise
        await self._dispatch(exchange)

    async def _authenticate(self, exchange: HttpExchange) -> None:
        """Identify the client by its API key. Raises: RequestError: it has no accepted key."""
        identity = await self._keys.identity(exchange.raw_headers, exchange.path)
        exchange.is_trusted = True
        exchange.keep_slot()
        for name in ("x-api-key", "authorization"):  # from here on only the accepted key counts
            exchange.headers.pop(name, None)
        if identity is not None:
            exchange.headers["x-api-key"] = identity

    async def _dispatch(self, exchange: HttpExchange) -> None:
        """Answer a request by an admin route, a local model, or the gateway."""
        path = exchange.path
        kind = ENCODER_PATHS.get(path)
        dialect = ANSWER_PATHS.get(path) or COUNT_PATHS.get(path) or "chat"  # "chat" for encoders
        if path not in _OF_MODELS:
            await self.routes.serve(exchange)
            return
        if exchange.method != "POST":
            raise wrong_method(exchange, "POST")
        gateway, encoder = self._gateway, None
        is_here = path in _OWN or path.startswith(OLLAMA_PREFIX) or kind == "rerank"
        is_here |= DIALECTS[dialect].litellm_dialect != dialect  # no cloud accepts such bodies
        if kind is not None and (is_here or gateway is None):
            encoder = self.encoders.model(kind)  # raises before the body is read
        body = await exchange.read_object()
        if path in _OWN:
            dialect = prefill_endpoint.dialect_of(body.fields, exchange.headers, exchange.query)
            exchange.is_anthropic |= dialect == "messages"
        if encoder is not None:
            encoder.check(body.fields.get("model"))
        if gateway is None:
            if encoder is not None:
                local = encoder.public
            else:
                name = self._names.name_or_default(body.fields.get("model"))
                if self._names.find(name) is None:
                    self.encoders.refuse_text(name)
                local = self._names.check(name)
            await self._answer_here(exchange, dialect, body, local)
            return
        group = encoder.public if encoder is not None else self._group(gateway, kind, body)
        if path in COUNT_PATHS:  # a count for a local model stays on this machine
            is_here |= any(deployment.local for deployment in gateway.table.deployments(group))

        async def answer_here(deployment: Deployment) -> None:
            await self._answer_here(exchange, dialect, body, deployment.local, deployment)

        if is_here:
            await answer_here(gateway.local_deployment(group))
            return
        cloud_dialect: CloudDialect = (
            "embeddings" if kind is not None else DIALECTS[dialect].litellm_dialect
        )
        if path in COUNT_PATHS:
            cloud_dialect = cast(CloudDialect, f"{dialect}_count")
        call = GatewayCall(cloud_dialect, body.fields, body.size, answer_here)
        await gateway.serve(exchange, group, call)

    def _group(self, gateway: Gateway, kind: EncoderKind | None, body: ClientBody) -> str:
        """Return the group of the body's model. Raises: RequestError: there is no such model."""
        names = self._names if kind is None else self.encoders.names or self._names
        name = names.name_or_default(body.fields.get("model"))
        group = gateway.group_of(name, names)
        if group is None:
            raise self._names.unknown_name_error(name, gateway.table.listed)
        return group

    async def _answer_here(
        self,
        exchange: HttpExchange,
        dialect: Dialect,
        body: ClientBody,
        local: str,
        deployment: Deployment | None = None,
    ) -> None:
        """Answer with the local model `local`, in text, tokens, vectors or scores.

        `deployment` is its entry in the LiteLLM config: LiteLLM may refuse the request, and gets a
        report of the answer.

        Raises:
            RequestError: nothing was sent.
        """
        path, kind = exchange.path, ENCODER_PATHS.get(exchange.path)
        if kind is not None:
            self.encoders.check_local(kind, local)
        elif deployment is not None:
            self.encoders.refuse_text(local)
        reporting: AbstractAsyncContextManager[LocalAccount | None] = contextlib.nullcontext()
        if self._gateway is not None and deployment is not None:
            accounts = self._gateway.accounts
            if kind is not None or path in ANSWER_PATHS:
                account_dialect = kind or DIALECTS[dialect].litellm_dialect
                reporting = accounts.reporting(exchange, account_dialect, deployment, body)
            else:
                await accounts.check(exchange, deployment.group)
        target = self._names.target(local)
        async with reporting as account:
            if path in COUNT_PATHS:
                await self.local.count(exchange, dialect, body, target)
                return
            if path in tokenize_endpoints.PATHS:
                await self.local.tokens(exchange, dialect, body, target)
                return
            with self.keep_awake.request():
                if kind is not None:
                    tokens = await self.encoders.answer(exchange, kind, body)
                    if account is not None:
                        account.tokens = tokens
                elif path == prefill_endpoint.PATH:
                    await self.local.prefill(exchange, dialect, body, target)
                else:
                    await self.local.generate(exchange, dialect, body, target, account)


def _id_headers(request_id: str) -> RawHeaders:
    return [(name, request_id.encode()) for name in _ID_HEADERS]


async def _preflight(exchange: HttpExchange) -> None:
    headers: list[tuple[bytes, Any]] = [
        (b"access-control-allow-methods", _CORS_METHODS),
        (b"access-control-max-age", b"600"),
    ]
    if asked := exchange.headers.get("access-control-request-headers"):
        headers.append((b"access-control-allow-headers", asked.encode("latin-1")))
    if exchange.headers.get("access-control-request-private-network") == "true":
        headers.append((b"access-control-allow-private-network", b"true"))
    await exchange.start(204, headers)
    await exchange.body(b"", more=False)
