"""Reports local answers to LiteLLM in the background, and lets LiteLLM check its own API keys.

Answers are reported only if the config has a use for them. Keys are checked for local requests and
for our own routes too. `litellm_accounts` does the work in LiteLLM's process.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hearth.proxy.api import prefill_endpoint
from hearth.proxy.api.answer_frames import WholeChoice, total_usage
from hearth.proxy.api.dialects import ANSWER_PATHS
from hearth.proxy.gateway.config_file import leaves
from hearth.proxy.gateway.litellm_messages import KEY_HEADERS, PATHS, AccountDialect, LocalAnswerLog
from hearth.proxy.gateway.litellm_process import LiteLLMConnection, LiteLLMProcess
from hearth.proxy.gateway.routing_table import Deployment
from hearth.proxy.http.api_keys import Headers
from hearth.proxy.http.http_exchange import ClientBody, HttpExchange
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Usage

# Routes that LiteLLM knows, by path or prefix; a key may be limited to some of them.
_ROUTES: Final = (
    *("/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
    *("/v1/messages", "/v1/responses", "/responses", "/v1/embeddings", "/embeddings"),
    *("/v1/rerank", "/v2/rerank", "/rerank"),
)
_MODELS: Final = ("/v1/models", "/models")  # LiteLLM allows paths below these to user keys only
_CHAT, _EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_LIKE: Final = {  # other routes, each with the LiteLLM route that does the same
    prefill_endpoint.PATH: _CHAT,
    **dict.fromkeys(ANSWER_PATHS, _CHAT),
    **dict.fromkeys(("/api/embed", "/api/embeddings"), _EMBEDDINGS),
}


def route_of(path: str) -> str:
    """Return the LiteLLM route for which a key is checked at `path`.

    LiteLLM does not know our own routes. A key that may chat may prefill a prompt; a key that may
    list models may use the other routes.
    """
    if path in _MODELS or any(path == route or path.startswith(f"{route}/") for route in _ROUTES):
        return path
    return _LIKE.get(path, _MODELS[0])


class LiteLLMKeys:
    """Asks LiteLLM who owns a key and what the key may do. Owner: our event loop."""

    def __init__(self, litellm: LiteLLMProcess, own_header: str = "") -> None:
        """`own_header` is the config's litellm_key_header_name."""
        self.headers = (*KEY_HEADERS, own_header.lower().encode()) if own_header else KEY_HEADERS
        self._litellm = litellm

    async def identity(
        self, headers: Headers, path: str = "", method: str = "POST", group: str = ""
    ) -> str:
        """See `ClientKeys`. With a `group`, check too that the key may use it; reserve nothing.

        `api_key_digest` of the result names the owner of cache, turns and stored responses.
        Without a key LiteLLM is not asked.
        """
        sent = list(headers)
        if not any(value.strip() for name, value in sent if name in self.headers):
            text = "An API key is required. Send one of LiteLLM's as 'Authorization: Bearer KEY'."
            raise RequestError(text, status=401, code="invalid_api_key")
        fields = _caller(method, path, sent) | {"group": group}
        owner: str = await self._litellm.ask("owner", fields)
        return owner

    async def begin(
        self, exchange: HttpExchange, path: str, group: str, dialect: AccountDialect
    ) -> LiteLLMConnection:
        """Reserve a local answer for `group` in the key's limits; return its connection.

        The answer's report must go over that connection; closing the connection earlier releases
        the reservation.

        Raises:
            RequestError: the key's models, budget or limits do not allow the request.
        """
        fields = {"group": group, "dialect": dialect, "request_id": exchange.request_id}
        connection = await self._litellm.connect()
        try:
            caller = _caller(exchange.method, path, exchange.raw_headers)
            await connection.ask("begin", caller | fields)
        except BaseException:
            connection.close()
            raise
        return connection


def _caller(method: str, path: str, headers: Headers) -> dict[str, Any]:
    """Return the parts of a request by which LiteLLM identifies its owner, without texts."""
    decoded = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    return {"method": method, "path": route_of(path), "headers": decoded}


# The fields of a body that LiteLLM logs as prompt and model parameters, and `system` and
# `instructions`.
LOGGED: Final = (
    *("messages", "prompt", "input", "query", "user"),
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop"),
    *("seed", "n", "presence_penalty", "frequency_penalty", "tools", "tool_choice", "stream"),
    *("response_format", "reasoning_effort", "system", "instructions"),
)


@dataclass(slots=True)
class LocalAccount:
    """Collects what LiteLLM's log needs of one local answer. Owner: the task that serves it."""

    deployment: Deployment
    request_id: str
    dialect: AccountDialect
    body: ClientBody
    keeps_texts: bool
    connection: LiteLLMConnection | None = None  # holds the key's reservation in LiteLLM
    tokens: int | None = None  # embedded or ranked tokens; None for other requests
    _began_at: float = field(default_factory=awake_s)
    _request: ParsedRequest | None = None
    _answers: list[AnswerStream] = field(default_factory=list)
    _first: WholeChoice | None = None  # the first choice, whose text is logged

    def admitted(self, request: ParsedRequest, answers: list[AnswerStream]) -> None:
        """Take in the answers of a request, and collect the text of the first as it is read."""
        self._request, self._answers = request, answers
        if self.keeps_texts:
            self._first = first = WholeChoice()
            # The log has no log probabilities, which take 5 kB for each token.
            answers[0].on_read = lambda delta: first.add(replace(delta, logprobs=[]))

    @property
    def needs_report(self) -> bool:
        """Return whether there is an answer to report, or a reservation to release."""
        return bool(self._answers) or self.tokens is not None or self.connection is not None

    @property
    def held_bytes(self) -> int:
        """Return roughly the memory that the log takes."""
        return self.body.size if self._first is not None else 0

    def log(self, broken: RequestError | None) -> LocalAnswerLog:
        """Return the log at the answer's end; `broken` is why the client did not get it whole.

        The tokens of all choices are added up. The answer's own failure goes before `broken`.
        """
        ended_at = time.time()
        asked_at = ended_at - (awake_s() - self._began_at)
        usage = None if self.tokens is None else Usage(self.tokens, 0, self.tokens, 0)
        first_token_at, finish_reason = None, "stop"
        error = None if broken is None else (broken.status, str(broken))
        if self._request is not None:
            usages = [answer.usage for answer in self._answers if answer.usage is not None]
            if len(usages) == len(self._answers):
                usage = total_usage(usages, self._request.choices)
            first = self._answers[0]
            if usage is not None and usage.completion_tokens:
                wait_s = first.asked_at - self._began_at + usage.ttft_ms / 1000
                first_token_at = min(ended_at, asked_at + max(0.0, wait_s))
            finish_reason = first.ended_as if first.status == 200 else "stop"
            outcomes = (answer.outcome(broken) for answer in self._answers)
            failures = [(status, f"The answer ended: {code}.") for code, status in outcomes]
            error = next((failure for failure in failures if failure[0] != 200), error)
        body = self.body.fields
        return LocalAnswerLog(
            request_id=self.request_id,
            deployment_id=self.deployment.id,
            group=self.deployment.group,
            model=self.deployment.local,
            dialect=self.dialect,
            body={name: body[name] for name in LOGGED if name in body} if self._first else {},
            stream=bool(body.get("stream")),
            asked_at=asked_at,
            first_token_at=first_token_at,
            ended_at=ended_at,
            usage=usage,
            finish_reason=finish_reason,
            error=error,
            session=self._request.prompt.speaker.session if self._request else "",
            **(_texts(self._first) if self._first else {}),
        )


def _texts(choice: WholeChoice) -> dict[str, Any]:
    """Return the LocalAnswerLog's fields for the texts of a choice."""
    calls = [{"id": call.id, "name": call.name, "arguments": text} for call, text in choice.calls]
    return {"calls": calls, "text": choice.text("content"), "thinking": choice.text("reasoning")}


log = logging.getLogger(__name__)

LOGS_MAX: Final = 1_024  # reports that wait or are being sent
LOG_BYTES_MAX: Final = 64 * 1024 * 1024  # bytes of the requests and answers in all reports
AT_ONCE_MAX: Final = 16  # reports that are sent at the same time
LOG_S_MAX: Final = 60.0  # time for all callbacks to take one report
# Names of a config's entries, at any level, that need a report of each answer.
_CALLBACKS: Final = ("callbacks", "success_callback", "failure_callback")
_COUNTED: Final = (
    *("max_budget", "budget_duration", "budget_limit", "tpm", "rpm", "max_parallel_requests"),
    "optional_pre_call_checks",
)
_BLIND: Final = "simple-shuffle"  # the routing strategy that ignores answers


class Accounts:
    """Reports local answers to LiteLLM, and has it check keys. Owner: our event loop.

    Invariant: at most LOGS_MAX reports and LOG_BYTES_MAX of their texts wait; further reports
    are dropped, counted and logged. A report that holds a reservation of a LiteLLM key is never
    dropped, but loses its texts instead; LiteLLM itself limits the number of reservations.
    """

    def __init__(
        self, config: Mapping[str, Any], litellm: LiteLLMProcess, *, checks_keys: bool
    ) -> None:
        """`config` is the user's; with `checks_keys` clients' keys are LiteLLM's."""
        self.keys: LiteLLMKeys | None = None  # None: LiteLLM does not check keys
        given = {name: value for name, value in leaves(config) if value}
        if checks_keys:
            self.keys = LiteLLMKeys(litellm, str(given.get("litellm_key_header_name", "")))
        calls_back = not given.keys().isdisjoint(_CALLBACKS)
        counts = given.get("routing_strategy", _BLIND) != _BLIND
        counts = counts or not given.keys().isdisjoint(_COUNTED)
        self.needs_reports = checks_keys or calls_back or counts
        # Callbacks get the texts of requests and answers.
        self.keeps_texts = calls_back and given.get("turn_off_message_logging") is not True
        self.on_lost: Callable[[str], None] = lambda why: None  # called with "dropped" or "failed"
        self.dropped = 0  # reports dropped for want of room
        self._litellm = litellm
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._at_once = asyncio.Semaphore(AT_ONCE_MAX)

    @contextlib.asynccontextmanager
    async def reporting(
        self,
        exchange: HttpExchange,
        dialect: AccountDialect,
        deployment: Deployment,
        body: ClientBody,
    ) -> AsyncIterator[LocalAccount | None]:
        """Report the local answer to `body` at the end of the block; yield None if none is needed.

        Raises:
            RequestError: the client's LiteLLM key does not allow the request now.
        """
        if not self.needs_reports:
            yield None
            return
        account = LocalAccount(deployment, exchange.request_id, dialect, body, self.keeps_texts)
        if self.keys is not None:
            path = exchange.path if dialect == "rerank" else PATHS[dialect]
            opening = self.keys.begin(exchange, path, deployment.group, dialect)
            account.connection = await exchange.while_connected(opening)
        error: RequestError | None = RequestError("It ended by a bug.", status=500)
        try:
            yield account
            error = exchange.broken_by
        except RequestError as raised:
            error = raised
            raise
        finally:
            if account.needs_report:
                self.report(account.log(error), account.held_bytes, account.connection)

    async def check(self, exchange: HttpExchange, group: str) -> None:
        """Check the key of a request for `group` that is not billed: a count, or a prefill.

        Raises:
            RequestError: the client's LiteLLM key does not allow the request.
        """
        if self.keys is not None:
            request = (exchange.raw_headers, exchange.path, exchange.method, group)
            await exchange.while_connected(self.keys.identity(*request))

    def report(
        self, answer: LocalAnswerLog, size: int, connection: LiteLLMConnection | None = None
    ) -> None:
        """Send `answer` to LiteLLM's callbacks, budgets and spend soon; never waits or raises.

        `size` is roughly the memory of the report without the answer's text. `connection` holds
        the key's reservation.
        """
        size += len(answer.text) + len(answer.thinking)
        size += sum(len(call["arguments"]) for call in answer.calls)
        if len(self._tasks) >= LOGS_MAX or self._bytes + size > LOG_BYTES_MAX:
            if connection is None:
                self.dropped += 1
                self.on_lost("dropped")
                if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                    log.warning(
                        "LiteLLM's callbacks are told of answers more slowly than they end: %d "
                        "answers of %d bytes wait, limits %d and %d; %d were dropped. See to a "
                        "faster callback.",
                        *(len(self._tasks), self._bytes, LOGS_MAX, LOG_BYTES_MAX, self.dropped),
                    )
                return
            answer, size = replace(answer, body={}, text="", thinking="", calls=()), 0
        self._bytes += size
        task = asyncio.create_task(self._report(answer, size, connection), name="litellm-log")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(
        self, answer: LocalAnswerLog, size: int, connection: LiteLLMConnection | None
    ) -> None:
        try:
            async with self._at_once:
                connection = connection or await self._litellm.connect()
                await connection.ask("log", answer, LOG_S_MAX, size)
        except RequestError as error:
            self.on_lost("failed")
            log.warning(
                "LiteLLM's callbacks did not take the answer id=%s: %s", answer.request_id, error
            )
        finally:
            self._bytes -= size
            if connection is not None:
                connection.close()

    async def close(self, wait_s: float) -> None:
        """Send the waiting reports within `wait_s`; drop and count the rest."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=wait_s)
        for task in late:
            task.cancel()
        self.dropped += len(late)
        await asyncio.gather(*late, return_exceptions=True)
