"""Sends each request to the deployment that the user's LiteLLM config means, and falls back.

Local deployments are answered by us, all others by LiteLLM. What LiteLLM's config calls fallbacks
is done here, since only we know whether anything of an answer was sent.
Requests that others answered are counted and remembered once LiteLLM has told their cost.
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
from hearth.proxy.request.session_id import key_digest, session_digest, session_of
from hearth.shared.errors import RequestError
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

USAGE_WAIT_S_MAX: Final = 10.0  # for LiteLLM's log after the reply's end
WAITING_MAX: Final = 1_024  # requests whose usage has not come, or usages whose request goes on


@dataclass(slots=True)
class CloudReply:
    """What came of a call to another server, once it has ended. Times are those of `awake_s`."""

    dialect: CloudDialect
    asked: Mapping[str, Any]  # the client's body
    served_by: str
    fallback: str  # who failed before, as the header has it
    began_at: float
    status: int = 0  # 0 = it has not answered
    first_byte_at: float | None = None
    error: RequestError | None = None  # it refused, failed or broke off, or its client left


@dataclass(slots=True)
class CloudRequests:
    """Counts what the gateway does; notes a request elsewhere once LiteLLM has told its cost.

    Owner: the event loop. Nothing here waits.
    Invariant: each request given to `ended` is noted once, and each usage is in the sums once.
    """

    requests: RecentRequests
    metrics: RequestMetrics
    served_by: Callable[[str], str]  # of a deployment's id
    # Whose usage has not come, each with its key and whether it was a stream
    _ended: dict[str, tuple[RequestRow, str, bool]] = field(default_factory=dict)
    _usages: dict[str, CloudUsage] = field(default_factory=dict)  # whose requests go on

    def cloud_ended(self, exchange: HttpExchange, reply: CloudReply) -> None:
        """Take a reply at its end. A count of tokens is no request for text, and is not noted."""
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
        key = key_digest(exchange.headers)
        speaker = session_of(exchange.headers, reply.asked, key)
        began, first = reply.began_at, reply.first_byte_at
        row = {
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
        self.ended(row, key, bool(reply.asked.get("stream")))

    def ended(self, row: RequestRow, key: str = "", is_stream: bool = False) -> None:
        """Take a request of `key` at its reply's end; it is noted once its usage is known."""
        usage = self._usages.pop(row["id"], None)
        self._ended[row["id"]] = row, key, is_stream
        if usage is not None or len(self._ended) > WAITING_MAX:
            self._note(row["id"], usage)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(USAGE_WAIT_S_MAX, self._note, row["id"])

    def told(self, usage: CloudUsage) -> None:
        """Take what LiteLLM says that a call cost; a failed one may come before the used one."""
        self.metrics.gateway.spent(self.served_by(usage.deployment_id), usage)
        if usage.request_id in self._ended:
            self._note(usage.request_id, usage)
            return
        earlier = self._usages.pop(usage.request_id, None)
        self._usages[usage.request_id] = usage if earlier is None else _sum(earlier, usage)
        if len(self._usages) > WAITING_MAX:  # of requests that nobody will end
            del self._usages[next(iter(self._usages))]

    def close(self) -> None:
        """Note what has ended, without its usage: the server stops."""
        for request_id in list(self._ended):
            self._note(request_id)

    def _note(self, request_id: str, usage: CloudUsage | None = None) -> None:
        """Note a request that has ended, unless it is noted."""
        if request_id not in self._ended:
            return
        row, key, is_stream = self._ended.pop(request_id)
        self.requests.record_cloud(row, usage, key)
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        log.info(
            "request id=%s dialect=%s stream=%d served_by=%s fallback=%s prompt=%s cached=%s "
            "completion=%s ended=%s wall_ms=%d",
            *(request_id, row["dialect"], is_stream, row["served_by"], row["fallback"] or "-"),
            *(getattr(usage, name, "-") for name in names),
            *(row["ended"], row["wall_ms"]),
        )


def _sum(one: CloudUsage, other: CloudUsage) -> CloudUsage:
    return CloudUsage(
        other.request_id,
        other.deployment_id,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cost + other.cost,
    )


FALLBACK_HEADER: Final = b"x-hearth-fallback"
LOGS_WAIT_S_MAX: Final = 2.0  # at the end, for callbacks to take what waits
SESSIONS_MAX: Final = 4_096
ATTEMPTS_MAX: Final = 24  # of one request, over all groups, those that have nobody too
_ENDS: Final = ("completed", "incomplete")  # of responses that can be gone on from
_END_MARKS: Final = tuple(f'"{status}"'.encode() for status in _ENDS)
_OURS: Final = ("slow_reader", "internal_error")  # 5xx that another deployment would not mend


def cause_of(error: RequestError) -> Cause | None:
    """Return which fallbacks are for `error`; None where it is the client's own mistake."""
    if isinstance(error, CloudError):
        return error.cause
    if error.status >= 500 and error.code not in _OURS:
        return "error"
    return "context_window" if error.code == "context_length_exceeded" else None


_WORDS: Final = {  # of errors' codes, as header, log and metrics tell them
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
    """Return in one word why a deployment did not answer."""
    if (word := _WORDS.get(error.code)) is not None:
        return word
    if error.status == 429:
        return "rate_limited"
    if error.status in (408, 504):
        return "timeout"
    return "cloud_error" if isinstance(error, CloudError) else "other"


@dataclass(frozen=True, slots=True)
class GatewayCall:
    """What one request asks of whichever deployment answers it."""

    dialect: CloudDialect
    body: dict[str, Any]  # as the client sent it
    size: int  # of the body, in bytes
    answer_here: Callable[[Deployment], Awaitable[None]]  # has its local model answer


@dataclass(slots=True)
class _Attempts:
    """What one request has tried. Owner: the task that serves it."""

    request_id: str
    group: str
    preferred: str  # the id of the deployment that has the session's cache
    seen: set[str] = field(default_factory=set)  # groups
    tried: set[str] = field(default_factory=set)  # groups of which a deployment has failed
    groups: list[str] = field(default_factory=list)  # names to be tried behind the group
    failed: set[str] = field(default_factory=set)  # ids of deployments
    first_error: RequestError | None = None
    told: list[str] = field(default_factory=list)  # who failed and why
    causes: list[str] = field(default_factory=list)  # since a deployment was last tried

    def fail(self, who: str, error: RequestError) -> None:
        self.first_error = self.first_error or error
        self.told.append(f"{who} {cause_word(error)}")
        self.causes.append(cause_word(error))
        log.info(
            "attempt failed id=%s served_by=%s cause=%s code=%s status=%d",
            *(self.request_id, who, cause_word(error), error.code, error.status),
        )

    @property
    def fallback(self) -> str:
        """Return who failed and why, fit for a header."""
        return "; ".join(self.told).encode("ascii", "replace").decode()

    @property
    def headers(self) -> RawHeaders:
        return [(FALLBACK_HEADER, self.fallback.encode())] if self.told else []


class Gateway:
    """Chooses deployments, answers through them and falls back. Owner: the event loop.

    Invariant: a request that has sent anything to its client is never sent to a second deployment.
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
        # Kept for one key: which server has a conversation, by digests
        self._sessions: MemoryByOwner[bytes, str] = MemoryByOwner(SESSIONS_MAX)

    def start(self) -> None:
        """Begin to load LiteLLM; returns at once."""
        self.litellm.start(self._records.told)

    async def close(self) -> None:
        """Tell LiteLLM what it has not been told, end it, and note what it has not told."""
        await self.accounts.close(LOGS_WAIT_S_MAX)
        await self.litellm.close()
        self._records.close()

    def group_of(self, name: str, names: ModelNames | None = None) -> str | None:
        """Return the group that `name` stands for; None where nothing here has that name.

        A name in the config goes before our own names and aliases; then both without case; then
        a pattern in the config, and CATCH_ALL_MODELS. Each local model is a group of its own.
        Our own `names` are those of models of text, or of the one that embeds.
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
        local = next((row for row in self.table.deployments(group) if row.local), None)
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
        key = key_digest(exchange.headers)
        session, preferred = await self._session(exchange, key, group, call)
        began_at = self._sessions.get(key, session)
        attempts = _Attempts(exchange.request_id, group, began_at or preferred, seen={group})
        plain_headers = list(exchange.reply_headers)
        for _ in range(ATTEMPTS_MAX):
            exchange.late_headers = list
            exchange.reply_headers[:] = [*plain_headers, *attempts.headers]
            deployment = None
            try:
                deployment = await exchange.while_connected(self._of_group(attempts, call))
                exchange.counting.pop_all()  # the request goes on
                while attempts.causes:
                    self._records.metrics.gateway.fell_back(attempts.causes.pop(0))
                if deployment.local:
                    await call.answer_here(deployment)
                else:
                    await self._answer_there(exchange, deployment, call, attempts)
            except RequestError as error:
                self._fall_back(exchange, attempts, deployment, error)
            else:
                if not began_at:  # who fell back comes back: the session's cache is where it began
                    self._sessions.put(key, session, deployment.id)
                return
        assert attempts.first_error is not None
        raise attempts.first_error

    async def _session(
        self, exchange: HttpExchange, key: str, group: str, call: GatewayCall
    ) -> tuple[bytes, str]:
        """Return the session of a request, and who made the response that it goes on from."""
        body, maker = call.body, ""
        if call.dialect == "responses":
            maker = self._stored.maker(key, body)
            with contextlib.suppress(RequestError):  # it may be kept elsewhere
                body = self._stored.expanded(key, body)  # whose opening is the conversation's
        naming = functools.partial(session_digest, key, group, exchange.headers, body)
        working = work_on_body(call.size, naming)
        is_large = call.size > SMALL_BYTES_MAX
        return await (exchange.while_connected(working) if is_large else working), maker

    # ------------------------------------------------------------ who is tried

    async def _of_group(self, attempts: _Attempts, call: GatewayCall) -> Deployment:
        """Return a deployment of the group. Raises: RequestError: it has none now."""
        rows = self.table.deployments(attempts.group)
        left = [row for row in rows if row.id not in attempts.failed]
        if not left:
            text = f"No deployment of {attempts.group!r:.200} is left to try."
            raise RequestError(text, status=503, code="no_deployment")
        local = [row for row in left if row.local]
        if local and (len(left) == 1 or not self.litellm.is_usable):
            self.litellm.wake()
            return local[0]  # there is no choice, or nobody yet who could choose
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
        except LiteLLMUnavailable:  # it has ended, or a callback holds it up
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
        """Have the next attempt be another deployment; of another group where this had None.

        Raises:
            RequestError: `error`, where nothing may follow it; the first failure where nothing is
                left, since it is what was asked for.
        """
        cause = cause_of(error)
        if exchange.has_started or cause is None:
            raise error
        is_first = attempts.group not in attempts.tried
        if deployment is not None or is_first:
            who = self.table.served_by(deployment) if deployment is not None else attempts.group
            attempts.fail(who, error)
        if is_first:  # it names the fallbacks
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
        if cause != "error":  # the same model elsewhere would say the same
            rows = self.table.deployments(attempts.group)
            attempts.failed |= {row.id for row in rows if row.model == deployment.model}

    # ------------------------------------------------------------ what another server answers

    async def _answer_there(
        self,
        exchange: HttpExchange,
        deployment: Deployment,
        call: GatewayCall,
        attempts: _Attempts,
    ) -> None:
        """Have LiteLLM answer.

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
        """Send the request there and its reply back; a response is kept before its client reads it.

        Raises:
            RequestError: it refused or failed, and nothing was sent.
        """
        await work_on_body(call.size, lambda: prompt_limits.check_body(call.body))
        given, whole, size = call.body, None, call.size
        key = key_digest(exchange.headers)
        if call.dialect == "responses":
            found = self._stored.for_cloud(key, given, deployment.id)
            given, whole = found.body, found.whole
            if call.body.get("previous_response_id"):
                size += SMALL_BYTES_MAX  # with a conversation of any size
        write = functools.partial(cloud_json, call.dialect, given, deployment)
        content = await work_on_body(size, write)
        headers = cloud_headers(exchange.headers)
        headers.append((REQUEST_HEADER.encode(), exchange.request_id.encode()))
        if (keys := self.accounts.keys) is not None:
            headers += [row for row in exchange.raw_headers if row[0] in keys.headers]

        async def keep(part: bytes) -> None:
            if whole is None:
                return
            response = await work_on_body(len(part), functools.partial(final_response, part))
            if response is not None:
                make = functools.partial(self._stored.made, whole, response, deployment.id)
                entry = await work_on_body(size, make)
                if entry is not None:
                    self._stored.add(key, response, entry)

        async with self.litellm.call(deployment, PATHS[call.dialect], content, headers) as cloud:
            reply.status, kept_headers = await cloud.start()
            await exchange.start(reply.status, kept_headers)
            async for chunk in cloud.chunks():
                reply.first_byte_at = reply.first_byte_at or awake_s()
                await keep(chunk)
                await exchange.body(chunk, more=True)
            if cloud.failure is not None:
                reply.error = cloud.failure
                if not cloud.is_complete:  # LiteLLM has not written of it
                    await exchange.body(_error_event(reply.error, call.dialect), more=True)
            await exchange.body(b"", more=False)


def make_gateway(table: RoutingTable, settings: Settings, routes: AdminRoutes) -> Gateway:
    """Return the gateway and what it runs on, not yet started.

    `table` is of the config that LITELLM_CONFIG names.
    """
    routes.groups = table.listed
    metrics, names = routes.metrics, routes.names
    served_by = {row.id: table.served_by(row) for row in table.all_deployments}
    clouds = (served_by[row.id] for row in table.all_deployments if not row.local)
    metrics.gateway.add_servers(map(served_here, names.models), is_cloud=False)
    metrics.gateway.add_servers(clouds, is_cloud=True)
    litellm = LiteLLMProcess(table, settings.instance_dir, settings.log_level)
    records = CloudRequests(routes.requests, metrics, lambda name: served_by.get(name, ""))
    accounts = Accounts(table.config.values, litellm, checks_keys=table.checks_keys)
    accounts.on_lost = metrics.gateway.log_lost
    return Gateway(table, names, litellm, routes.stored, records, accounts)


def _error_event(error: RequestError, dialect: CloudDialect) -> bytes:
    """Return what ends a stream of `dialect`; counts and embeddings are told as chat is."""
    return DIALECTS.get(cast(Dialect, dialect), DIALECTS["chat"]).error_event(error)


def cloud_json(dialect: CloudDialect, body: dict[str, Any], deployment: Deployment) -> bytes:
    sent = cloud_body(dialect, body, deployment.group)
    provider = deployment.provider or deployment.model.partition("/")[0]
    continues = dialect == "chat" and body.get("continue_final_message") is True
    if continues and provider in CONTINUERS:
        sent |= {name: body[name] for name in CONTINUING if type(body.get(name)) is bool}
    return orjson.dumps(  # a WrittenObject, the only subclass, as it was written
        sent, lambda given: orjson.Fragment(given.text), orjson.OPT_PASSTHROUGH_SUBCLASS
    )


def final_response(part: bytes) -> dict[str, Any] | None:
    """Return the response of Responses, to be gone on from, that `part` of LiteLLM's reply ends in.

    A part is an event, as LiteLLM writes each in one piece, or the whole reply of no stream.
    """
    if not any(mark in part for mark in _END_MARKS):
        return None
    try:
        row = orjson.loads(part if part.startswith(b"{") else part.partition(b"data:")[2])
    except orjson.JSONDecodeError:
        return None
    found = row.get("response", row) if type(row) is dict else None
    return found if type(found) is dict and found.get("status") in _ENDS else None
