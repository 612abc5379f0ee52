"""Sends each request to a deployment of the user's LiteLLM config, and falls back to others.

This server answers for local deployments, LiteLLM for all others. The config's fallbacks are done
here, since only this process knows whether a part of an answer was sent. A request that a cloud
answered is counted and listed once LiteLLM has reported its cost.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import orjson

from hearth.proxy.api.body import prompt_limits
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway.cloud_bodies import CloudDialect, cloud_body, cloud_headers
from hearth.proxy.gateway.cloud_failure import CloudError
from hearth.proxy.gateway.cloud_fields import CONTINUERS, CONTINUING
from hearth.proxy.gateway.litellm_messages import PATHS, REQUEST_HEADER
from hearth.proxy.gateway.litellm_process import LiteLLMProcess, LiteLLMUnavailable
from hearth.proxy.gateway.local_accounts import Accounts
from hearth.proxy.gateway.routing_table import Cause, Deployment, RoutingTable
from hearth.proxy.http.http_exchange import (
    SERVED_BY_HEADER,
    SMALL_BYTES_MAX,
    ClientGone,
    HttpExchange,
    RawHeaders,
    work_on_body,
)
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.metrics import (
    ANSWERED,
    CANCELLED,
    CloudUsage,
    RequestMetrics,
    outcome_elsewhere,
    served_here,
)
from hearth.proxy.monitoring.recent_requests import RecentRequests, RequestRow
from hearth.proxy.request.model_names import ModelNames
from hearth.proxy.request.parsed_request import Dialect
from hearth.proxy.request.session_id import api_key_digest, session_digest, session_of
from hearth.shared.errors import RequestError
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

USAGE_WAIT_S_MAX: Final = 10.0  # time for LiteLLM's usage report after the reply's end
WAITING_MAX: Final = 1_024  # ended requests without usage, and usages of open requests


@dataclass(slots=True)
class CloudReply:
    """The outcome of a cloud call, complete once it has ended. Times are those of `awake_s`."""

    dialect: CloudDialect
    client_body: Mapping[str, Any]  # the client's body
    served_by: str
    fallback: str  # deployments that failed before, as the header names them
    began_at: float
    status: int = 0  # HTTP status; 0 = no reply yet
    first_byte_at: float | None = None
    error: RequestError | None = None  # why the call failed; also set if the client left


@dataclass(slots=True)
class CloudRequests:
    """Counts cloud requests, and records each once LiteLLM has reported its usage.

    Owner: the event loop. No method waits.
    Invariant: each request given to `ended` is recorded once, and each usage is in the sums once.
    """

    requests: RecentRequests
    metrics: RequestMetrics
    served_by: Callable[[str], str]  # maps a deployment's id to its name
    # Ended requests without usage, by request id: entry, API key digest, whether it streamed
    _ended: dict[str, tuple[RequestRow, str, bool]] = field(default_factory=dict)
    _usages: dict[str, CloudUsage] = field(default_factory=dict)  # usages of open requests

    def cloud_ended(self, exchange: HttpExchange, reply: CloudReply) -> None:
        """Record a reply at its end, unless it is a count of tokens."""
        if reply.dialect in ("messages_count", "responses_count"):
            return
        exchange.is_counted = True
        error = reply.error or exchange.broken_by
        is_gone = isinstance(error, ClientGone)
        has_broken = error is not None and (is_gone or reply.status < 400)
        status = error.status if error is not None and has_broken else reply.status
        seen = reply.status if exchange.has_started and not is_gone else status
        outcome = outcome_elsewhere(seen, is_whole=error is None)
        self.metrics.ended(reply.dialect, outcome, reply.served_by)
        api_key = api_key_digest(exchange.headers)
        speaker = session_of(exchange.headers, reply.client_body, api_key)
        began, first = reply.began_at, reply.first_byte_at
        entry = {
            "id": exchange.request_id,
            "dialect": reply.dialect,
            "session": speaker.label,
            "client": speaker.client_name,
            "served_by": reply.served_by,
            "fallback": reply.fallback,
            "ended": ANSWERED if error is None else CANCELLED if is_gone else error.code,
            "wall_ms": round((awake_s() - began) * 1000),
            "ttft_ms": None if first is None else round((first - began) * 1000),
        }
        self.ended(entry, api_key, bool(reply.client_body.get("stream")))

    def ended(self, entry: RequestRow, api_key: str = "", is_stream: bool = False) -> None:
        """Take in a request of `api_key` at its end; it is recorded once its usage is known."""
        usage = self._usages.pop(entry["id"], None)
        self._ended[entry["id"]] = entry, api_key, is_stream
        if usage is not None or len(self._ended) > WAITING_MAX:
            self._record(entry["id"], usage)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(USAGE_WAIT_S_MAX, self._record, entry["id"])

    def receive_usage(self, usage: CloudUsage) -> None:
        """Take in a call's usage; a request has several usages if a failed call came before."""
        self.metrics.gateway.spent(self.served_by(usage.deployment_id), usage)
        if usage.request_id in self._ended:
            self._record(usage.request_id, usage)
            return
        earlier = self._usages.pop(usage.request_id, None)
        self._usages[usage.request_id] = usage if earlier is None else _sum(earlier, usage)
        if len(self._usages) > WAITING_MAX:  # drop the oldest, whose request may never end
            del self._usages[next(iter(self._usages))]

    def close(self) -> None:
        """Record the ended requests without their usage: the server stops."""
        for request_id in list(self._ended):
            self._record(request_id)

    def _record(self, request_id: str, usage: CloudUsage | None = None) -> None:
        """Record a request that has ended, unless it was recorded before."""
        if request_id not in self._ended:
            return
        entry, api_key, is_stream = self._ended.pop(request_id)
        self.requests.record_cloud(entry, usage, api_key)
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        log.info(
            "request id=%s dialect=%s stream=%d served_by=%s fallback=%s prompt=%s cached=%s "
            "completion=%s ended=%s wall_ms=%d",
            *(
                request_id,
                entry["dialect"],
                is_stream,
                entry["served_by"],
                entry["fallback"] or "-",
            ),
            *(getattr(usage, name, "-") for name in names),
            *(entry["ended"], entry["wall_ms"]),
        )


def _sum(earlier: CloudUsage, later: CloudUsage) -> CloudUsage:
    return CloudUsage(
        later.request_id,
        later.deployment_id,
        earlier.prompt_tokens + later.prompt_tokens,
        earlier.cached_tokens + later.cached_tokens,
        earlier.completion_tokens + later.completion_tokens,
        earlier.cost + later.cost,
    )


FALLBACK_HEADER: Final = b"x-hearth-fallback"
LOGS_WAIT_S_MAX: Final = 2.0  # time at shutdown for callbacks to take the waiting reports
SESSIONS_MAX: Final = 4_096
ATTEMPTS_MAX: Final = 24  # attempts of one request, groups without a deployment included
_ENDS: Final = ("completed", "incomplete")  # statuses of responses that a client can continue
_END_MARKS: Final = tuple(f'"{status}"'.encode() for status in _ENDS)
_OURS: Final = (
    "slow_reader",
    "internal_error",
)  # 5xx without fallback: another deployment would not help


def cause_of(error: RequestError) -> Cause | None:
    """Return the cause that selects fallbacks for `error`; None for the client's own mistake."""
    if isinstance(error, CloudError):
        return error.cause
    if error.status >= 500 and error.code not in _OURS:
        return "error"
    return "context_window" if error.code == "context_length_exceeded" else None


_WORDS: Final = {  # error codes as header, log and metrics name them
    "overloaded": "overloaded",
    "model_loading": "overloaded",
    "memory_pressure": "overloaded",
    "context_length_exceeded": "prompt_too_long",
    "model_unavailable": "model_not_loadable",
    "worker_unavailable": "worker_lost",
    "content_policy_violation": "content_policy",
    "over_budget": "over_budget",
}


def cause_word(error: RequestError) -> str:
    """Return the word for why a deployment did not answer."""
    if (word := _WORDS.get(error.code)) is not None:
        return word
    if error.status == 429:
        return "rate_limited"
    if error.status in (408, 504):
        return "timeout"
    return "cloud_error" if isinstance(error, CloudError) else "other"


@dataclass(frozen=True, slots=True)
class GatewayCall:
    """One request, in the form that each tried deployment gets."""

    dialect: CloudDialect
    body: dict[str, Any]  # body as the client sent it
    size: int  # bytes of the body
    answer_here: Callable[
        [Deployment], Awaitable[None]
    ]  # answers with the deployment's local model


@dataclass(slots=True)
class _Attempts:
    """The attempts of one request so far. Owner: the task that serves it."""

    request_id: str
    group: str
    preferred: str  # id of the deployment that has the session's cache
    seen: set[str] = field(default_factory=set)  # groups used so far
    tried: set[str] = field(default_factory=set)  # groups whose fallbacks were added
    groups: list[str] = field(default_factory=list)  # names that are still to be tried
    failed: set[str] = field(default_factory=set)  # ids of failed deployments
    first_error: RequestError | None = None
    failures: list[str] = field(default_factory=list)  # name and cause of each failure
    causes: list[str] = field(default_factory=list)  # causes not yet counted in the metrics

    def fail(self, served_by: str, error: RequestError) -> None:
        self.first_error = self.first_error or error
        self.failures.append(f"{served_by} {cause_word(error)}")
        self.causes.append(cause_word(error))
        log.info(
            "attempt failed id=%s served_by=%s cause=%s code=%s status=%d",
            *(self.request_id, served_by, cause_word(error), error.code, error.status),
        )

    @property
    def fallback(self) -> str:
        """Return the failures as text for a header."""
        return "; ".join(self.failures).encode("ascii", "replace").decode()

    @property
    def headers(self) -> RawHeaders:
        return [(FALLBACK_HEADER, self.fallback.encode())] if self.failures else []


class Gateway:
    """Chooses deployments, answers through them and falls back. Owner: the event loop.

    Invariant: once a byte of an answer was sent to the client, no other deployment is tried.
    """

    def __init__(
        self,
        table: RoutingTable,
        names: ModelNames,
        litellm: LiteLLMProcess,
        stored: ResponseStore,
        records: CloudRequests,
        accounts: Accounts,
    ) -> None:
        self.table = table
        self.accounts = accounts
        self.litellm = litellm
        self._names = names
        self._stored = stored
        self._records = records
        # The id of the deployment that answered first, by owner and digest of session and group
        # Kept for one key: the server that has a conversation, by digests
        self._sessions: MemoryByOwner[bytes, str] = MemoryByOwner(SESSIONS_MAX)

    def start(self) -> None:
        """Begin to load LiteLLM, and return at once."""
        self.litellm.start(self._records.receive_usage)

    async def close(self) -> None:
        """Send LiteLLM the waiting reports, end it, and record the requests without usage."""
        await self.accounts.close(LOGS_WAIT_S_MAX)
        await self.litellm.close()
        self._records.close()

    def group_of(self, name: str, names: ModelNames | None = None) -> str | None:
        """Return the group that `name` means; None if no group has that name.

        Names are tried in this order: names of the config, local names and aliases, both again
        without case, patterns of the config, CATCH_ALL_MODELS. Each local model is a group of its
        own. `names` are the local names: those of text models, or of the embedding model.
        """
        names = names or self._names
        return (
            self.table.exact_group(name)
            or names.find_exact(name)
            or self.table.loose_group(name)
            or names.find_loose(name)
            or self.table.pattern_group(name)
            or names.find_pattern(name)
        )

    def local_deployment(self, group: str) -> Deployment:
        """Return the first local deployment of `group`. Raises: RequestError: it has none."""
        local = next((entry for entry in self.table.deployments(group) if entry.local), None)
        if local is not None:
            return local
        raise RequestError(
            f"The model {group!r:.200} is served elsewhere, and this is for local models only: "
            f"{', '.join(self._names.listed)}.",
            code="unsupported_parameter",
            param="model",
        )

    async def serve(self, exchange: HttpExchange, group: str, call: GatewayCall) -> None:
        """Answer a request for `group`.

        Raises:
            RequestError: nothing was sent, and no deployment or fallback is left.
        """
        api_key = api_key_digest(exchange.headers)
        session, preferred = await self._session(exchange, api_key, group, call)
        began_at = self._sessions.get(api_key, session)
        attempts = _Attempts(exchange.request_id, group, began_at or preferred, seen={group})
        plain_headers = list(exchange.reply_headers)
        for _ in range(ATTEMPTS_MAX):
            exchange.late_headers = list
            exchange.reply_headers[:] = [*plain_headers, *attempts.headers]
            deployment = None
            try:
                deployment = await exchange.while_connected(self._of_group(attempts, call))
                exchange.counting.pop_all()  # the failed attempt is not counted
                while attempts.causes:
                    self._records.metrics.gateway.fell_back(attempts.causes.pop(0))
                if deployment.local:
                    await call.answer_here(deployment)
                else:
                    await self._answer_elsewhere(exchange, deployment, call, attempts)
            except RequestError as error:
                self._fall_back(exchange, attempts, deployment, error)
            else:
                if not began_at:  # later requests go to the deployment that has the session's cache
                    self._sessions.put(api_key, session, deployment.id)
                return
        assert attempts.first_error is not None
        raise attempts.first_error

    async def _session(
        self, exchange: HttpExchange, api_key: str, group: str, call: GatewayCall
    ) -> tuple[bytes, str]:
        """Return the digest of a request's session, and the deployment id of its last response.

        The id is "" if the request continues no stored response.
        """
        body, maker = call.body, ""
        if call.dialect == "responses":
            maker = self._stored.maker(api_key, body)
            with contextlib.suppress(RequestError):  # the response may be stored in the cloud
                body = self._stored.expand(api_key, body)  # from the conversation's start on
        naming = functools.partial(session_digest, api_key, group, exchange.headers, body)
        working = work_on_body(call.size, naming)
        is_large = call.size > SMALL_BYTES_MAX
        return await (exchange.while_connected(working) if is_large else working), maker

    # ------------------------------------------------------------ the choice of deployments

    async def _of_group(self, attempts: _Attempts, call: GatewayCall) -> Deployment:
        """Return a deployment of the group. Raises: RequestError: none is available."""
        deployments = self.table.deployments(attempts.group)
        left = [candidate for candidate in deployments if candidate.id not in attempts.failed]
        if not left:
            text = f"No deployment of {attempts.group!r:.200} is left to try."
            raise RequestError(text, status=503, code="no_deployment")
        local = [candidate for candidate in left if candidate.local]
        if local and (len(left) == 1 or not self.litellm.is_usable):
            self.litellm.wake()
            return local[0]  # the only one, or LiteLLM's Router cannot choose yet
        messages = call.body.get("messages")
        request = {"metadata": {}} | ({"messages": messages} if messages else {})
        try:
            return await self.litellm.choose(
                attempts.group,
                excluded=attempts.failed,
                preferred=attempts.preferred,
                request=request,
                size=call.size,
            )
        except LiteLLMUnavailable:  # LiteLLM has ended, or is blocked by a callback
            if local:
                return local[0]
            raise

    def _fall_back(
        self,
        exchange: HttpExchange,
        attempts: _Attempts,
        deployment: Deployment | None,
        error: RequestError,
    ) -> None:
        """Prepare the next attempt after `error`; a `deployment` of None means the group had none.

        Raises:
            RequestError: `error` itself if no fallback is allowed; if none is left, the
                first failure, which is about the requested model.
        """
        cause = cause_of(error)
        if exchange.has_started or cause is None:
            raise error
        is_first = attempts.group not in attempts.tried
        if deployment is not None or is_first:
            name = self.table.served_by(deployment) if deployment is not None else attempts.group
            attempts.fail(name, error)
        if is_first:  # the group's own fallbacks are added once
            attempts.tried.add(attempts.group)
            if len(attempts.seen) <= self.table.fallback_lists.steps_max:
                attempts.groups[:0] = self.table.fallbacks(attempts.group, cause)
        if deployment is None:
            while attempts.groups:
                group = self.group_of(attempts.groups.pop(0))
                if group is not None and group not in attempts.seen:
                    attempts.seen.add(group)
                    attempts.group = group
                    return
            raise attempts.first_error or error
        attempts.failed.add(deployment.id)
        if cause != "error":  # the same model on another server would fail too
            others = self.table.deployments(attempts.group)
            attempts.failed |= {other.id for other in others if other.model == deployment.model}

    # ------------------------------------------------------------ answers of the cloud

    async def _answer_elsewhere(
        self,
        exchange: HttpExchange,
        deployment: Deployment,
        call: GatewayCall,
        attempts: _Attempts,
    ) -> None:
        """Answer through LiteLLM, and record the reply.

        Raises:
            RequestError: nothing was sent.
        """
        served_by = self.table.served_by(deployment)
        exchange.reply_headers.append((SERVED_BY_HEADER, served_by.encode()))
        reply = CloudReply(call.dialect, call.body, served_by, attempts.fallback, awake_s())
        try:
            await exchange.while_connected(self._relay(exchange, deployment, call, reply))
        except RequestError as error:
            reply.error = error
            if exchange.has_started or cause_of(error) is None:
                self._records.cloud_ended(exchange, reply)
            raise
        self._records.cloud_ended(exchange, reply)

    async def _relay(
        self,
        exchange: HttpExchange,
        deployment: Deployment,
        call: GatewayCall,
        reply: CloudReply,
    ) -> None:
        """Send the request to LiteLLM, store a response, and send the reply to the client.

        Raises:
            RequestError: the cloud refused or failed, and nothing was sent.
        """
        await work_on_body(call.size, lambda: prompt_limits.check_body(call.body))
        given, whole, size = call.body, None, call.size
        api_key = api_key_digest(exchange.headers)
        if call.dialect == "responses":
            found = self._stored.for_cloud(api_key, given, deployment.id)
            given, whole = found.body, found.whole
            if call.body.get("previous_response_id"):
                size += SMALL_BYTES_MAX  # a stored conversation of unknown size was added
        write = functools.partial(cloud_json, call.dialect, given, deployment)
        content = await work_on_body(size, write)
        headers = cloud_headers(exchange.headers)
        headers.append((REQUEST_HEADER.encode(), exchange.request_id.encode()))
        if (keys := self.accounts.keys) is not None:
            headers += [header for header in exchange.raw_headers if header[0] in keys.headers]

        async def keep(part: bytes) -> None:
            if whole is None:
                return
            response = await work_on_body(len(part), functools.partial(final_response, part))
            if response is not None:
                make = functools.partial(self._stored.entry_for, whole, response, deployment.id)
                entry = await work_on_body(size, make)
                if entry is not None:
                    self._stored.add(api_key, response, entry)

        async with self.litellm.call(deployment, PATHS[call.dialect], content, headers) as cloud:
            reply.status, kept_headers = await cloud.start()
            await exchange.start(reply.status, kept_headers)
            async for chunk in cloud.chunks():
                reply.first_byte_at = reply.first_byte_at or awake_s()
                await keep(chunk)
                await exchange.body(chunk, more=True)
            if cloud.failure is not None:
                reply.error = cloud.failure
                if not cloud.is_complete:  # LiteLLM wrote no error event
                    await exchange.body(_error_event(reply.error, call.dialect), more=True)
            await exchange.body(b"", more=False)


def make_gateway(table: RoutingTable, settings: Settings, routes: AdminRoutes) -> Gateway:
    """Return the gateway and its parts, not yet started.

    `table` belongs to the config in LITELLM_CONFIG.
    """
    routes.groups = table.listed
    metrics, names = routes.metrics, routes.names
    served_by = {entry.id: table.served_by(entry) for entry in table.all_deployments}
    clouds = (served_by[entry.id] for entry in table.all_deployments if not entry.local)
    metrics.gateway.add_servers(map(served_here, names.models), is_cloud=False)
    metrics.gateway.add_servers(clouds, is_cloud=True)
    litellm = LiteLLMProcess(table, settings.instance_dir, settings.log_level)
    records = CloudRequests(routes.requests, metrics, lambda name: served_by.get(name, ""))
    accounts = Accounts(table.config.values, litellm, checks_keys=table.checks_keys)
    accounts.on_lost = metrics.gateway.log_lost
    return Gateway(table, names, litellm, routes.stored, records, accounts)


def _error_event(error: RequestError, dialect: CloudDialect) -> bytes:
    """Return the error event that ends a stream of `dialect`; chat's for counts and embeddings."""
    return DIALECTS.get(cast(Dialect, dialect), DIALECTS["chat"]).error_event(error)


def cloud_json(dialect: CloudDialect, body: dict[str, Any], deployment: Deployment) -> bytes:
    sent = cloud_body(dialect, body, deployment.group)
    provider = deployment.provider or deployment.model.partition("/")[0]
    continues = dialect == "chat" and body.get("continue_final_message") is True
    if continues and provider in CONTINUERS:
        sent |= {name: body[name] for name in CONTINUING if type(body.get(name)) is bool}
    return orjson.dumps(  # the only subclass, WrittenObject, keeps its text
        sent, lambda written: orjson.Fragment(written.text), orjson.OPT_PASSTHROUGH_SUBCLASS
    )


def final_response(part: bytes) -> dict[str, Any] | None:
    """Return the finished response in `part` of LiteLLM's Responses reply; None if it has none.

    A part is one whole event, or the whole reply if it is no stream.
    """
    if not any(mark in part for mark in _END_MARKS):
        return None
    try:
        event = orjson.loads(part if part.startswith(b"{") else part.partition(b"data:")[2])
    except orjson.JSONDecodeError:
        return None
    found = event.get("response", event) if type(event) is dict else None
    return found if type(found) is dict and found.get("status") in _ENDS else None
