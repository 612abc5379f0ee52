"""Sends each request to the deployment that the user's LiteLLM config means, and falls back.

Local deployments are answered by us, all others by LiteLLM. What LiteLLM's config calls fallbacks
is done here, since only we know whether anything of an answer was sent.
"""

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import orjson

from hearth.proxy.api.body import prompt_limits
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.responses.response_store import ResponseStore
from hearth.proxy.gateway.accounts.accounts import Accounts
from hearth.proxy.gateway.cloud import cloud_fields
from hearth.proxy.gateway.cloud.cloud_bodies import CloudDialect, cloud_body, cloud_headers
from hearth.proxy.gateway.cloud.cloud_failure import CloudError
from hearth.proxy.gateway.cloud_requests import CloudReply, CloudRequests
from hearth.proxy.gateway.config.routing_table import Cause, Deployment, RoutingTable
from hearth.proxy.gateway.litellm_messages import PATHS, REQUEST_HEADER
from hearth.proxy.gateway.litellm_process import LiteLLMProcess, LiteLLMUnavailable
from hearth.proxy.http.body_threads import SMALL_BYTES_MAX, work_on_body
from hearth.proxy.http.http_exchange import SERVED_BY_HEADER, HttpExchange, RawHeaders
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.gateway_metrics import served_here
from hearth.proxy.request.model_names import ModelNames
from hearth.proxy.request.parsed_request import Dialect
from hearth.proxy.request.session_id import key_digest, session_digest
from hearth.shared.errors import RequestError
from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.shared.settings_from_env import Settings
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

FALLBACK_HEADER: Final = b"x-hearth-fallback"
LOGS_WAIT_S_MAX: Final = 2.0  # at the end, for callbacks to take what waits
SESSIONS_MAX: Final = 4_096
ATTEMPTS_MAX: Final = 24  # of one request, over all groups, those that have nobody too
_CAUSES: Final[dict[str, Cause]] = {"context_length_exceeded": "context_window"}
_ENDS: Final = ("completed", "incomplete")  # of responses that can be gone on from
_END_MARKS: Final = tuple(f'"{status}"'.encode() for status in _ENDS)
_OURS: Final = ("slow_reader", "internal_error")  # 5xx that another deployment would not mend


def cause_of(error: RequestError) -> Cause | None:
    """Return which fallbacks are for `error`; None where it is the client's own mistake."""
    if isinstance(error, CloudError):
        return error.cause
    if error.status >= 500 and error.code not in _OURS:
        return "error"
    return _CAUSES.get(error.code)


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
                    self._records.fell_back(attempts.causes.pop(0))
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

    def _next_group(self, attempts: _Attempts) -> bool:
        while attempts.groups:
            group = self.group_of(attempts.groups.pop(0))
            if group is not None and group not in attempts.seen:
                attempts.seen.add(group)
                attempts.group = group
                return True
        return False

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
            if len(attempts.seen) <= self.table.fallbacks_max:
                attempts.groups[:0] = self.table.fallbacks(attempts.group, cause)
        if deployment is None:
            if not self._next_group(attempts):
                raise attempts.first_error or error
            return
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
    metrics.gateway.know(map(served_here, names.models), is_cloud=False)
    metrics.gateway.know(clouds, is_cloud=True)
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
    if continues and provider in cloud_fields.CONTINUERS:
        sent |= {
            name: body[name] for name in cloud_fields.CONTINUING if type(body.get(name)) is bool
        }
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
