"""Answers requests with the models of this server's workers: parses, submits, writes, counts."""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from hearth.proxy.api import prefill_endpoint, tokenize_endpoints
from hearth.proxy.api.answer_frames import AdmittedRequest, frames, total_usage
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.ollama import events as ollama_events, parse as ollama_parse
from hearth.proxy.api.parse_any_dialect import BodyParser, has_files
from hearth.proxy.gateway.local_accounts import LocalAccount
from hearth.proxy.http.http_exchange import (
    SERVED_BY_HEADER,
    SMALL_BYTES_MAX,
    ClientBody,
    HttpExchange,
    RawHeaders,
)
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.monitoring.metrics import served_here
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.parsed_request import Dialect, ParsedRequest
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

CACHE_HEADER: Final = b"x-hearth-cache"


class LocalAnswers:
    """Answers with local models. Owner: the event loop.

    Invariant: each request that a worker admitted is counted and logged once, at its end, unless
    nothing was sent and another deployment answers it.
    """

    def __init__(self, settings: Settings, pool: WorkerPool, routes: AdminRoutes) -> None:
        self._routes = routes
        self._names = routes.names
        self.body_parser = BodyParser(settings, routes.stored)
        self.pool = pool

    # ------------------------------------------------------------ the request

    async def _parse(
        self, exchange: HttpExchange, dialect: Dialect, body: ClientBody, target: str
    ) -> ParsedRequest:
        """Return the request in `body` with its files read, while the client is there."""
        size = body.size
        whole = self.body_parser.expand(dialect, body.fields, exchange.headers)
        if whole is not body.fields:  # a stored conversation of unknown size was added
            size += SMALL_BYTES_MAX
        parse = functools.partial(self.body_parser.parse, dialect, whole, exchange.headers)
        request = await exchange.work_on_body(size, parse)
        completing = self.body_parser.complete(request, exchange.hold, size)
        may_wait = size > SMALL_BYTES_MAX or has_files(request)
        request = await (exchange.while_connected(completing) if may_wait else completing)
        names = self._names
        return dataclasses.replace(
            request, target=names.model_of(target), adapter=names.adapter_of(target)
        )

    # ------------------------------------------------------------ the answer

    async def count(
        self, exchange: HttpExchange, dialect: Dialect, body: ClientBody, target: str
    ) -> None:
        """Answer with the token count of the prompt; `target` is ParsedRequest's.

        Raises:
            RequestError: nothing was sent. This holds for every method of the class.
        """
        request = await self._parse(exchange, dialect, body, target)
        counted = await exchange.while_connected(self.pool.count(request))
        kind = {"object": "response.input_tokens"} if dialect == "responses" else {}
        await exchange.send_json(200, kind | {"input_tokens": counted.tokens})

    async def tokens(
        self, exchange: HttpExchange, dialect: Dialect, body: ClientBody, target: str
    ) -> None:
        """Answer with the tokens of a text or prompt, or with the text of tokens or a prompt."""
        path, fields = exchange.path, body.fields
        reading = functools.partial(tokenize_endpoints.raw_prompt, path, fields)
        if raw := await exchange.work_on_body(body.size, reading):
            prompt, query = raw
            request = self.body_parser.raw_request(prompt, fields, exchange.headers)
            request = dataclasses.replace(request, target=self._names.model_of(target))
        else:
            query = tokenize_endpoints.template_query(path, fields)
            request = await self._parse(exchange, dialect, body, target)
        counted = await exchange.while_connected(self.pool.count(request, query))
        facts = self.pool.facts_of(request.target)
        context_tokens = facts.context_tokens if facts is not None else None
        size = tokenize_endpoints.answer_size(counted)
        write = functools.partial(tokenize_endpoints.answer, path, fields, counted, context_tokens)
        content = await exchange.work_on_body(size, write)
        await exchange.send_whole(200, content, b"application/json")

    async def prefill(
        self, exchange: HttpExchange, dialect: Dialect, body: ClientBody, target: str
    ) -> None:
        """Prefill a prompt without an answer, and pin it if the request asks for that."""
        started = awake_s()
        request = prefill_endpoint.prefill_request(
            await self._parse(exchange, dialect, body, target)
        )
        answer = await exchange.while_connected(self.pool.open(request, exchange.request_id))
        exchange.on_disconnect(answer.close)
        try:
            name = request.served_as or self._names.public
            result = await prefill_endpoint.prefill_result(answer, request, name)
            await exchange.send_json(200, result)
        finally:
            answer.close()
            self._count_ended(exchange, [answer], request, started)

    async def generate(
        self,
        exchange: HttpExchange,
        dialect: Dialect,
        body: ClientBody,
        target: str,
        account: LocalAccount | None = None,
    ) -> None:
        """Answer in `dialect`, whole or as a stream; `account` gets the answers for its report.

        Raises:
            RequestError: nothing was sent. A failure amid a stream is its last event instead.
        """
        unloads = False
        if dialect in (ollama_parse.CHAT, ollama_parse.GENERATE):
            unloads = ollama_parse.asks_to_unload(body.fields)
            if not ollama_parse.asks_for_answer(dialect, body.fields):
                await self._load(exchange, dialect, body, target, unloads)
                return
        request = await self._parse(exchange, dialect, body, target)
        name = request.served_as or self._names.public
        started = awake_s()
        answer, *others = await exchange.while_connected(
            self._open(request, exchange.request_id, started)
        )
        if account is not None:
            account.admitted(request, [answer, *others])
        admitted = AdmittedRequest(request, name, answer, tuple(others), received_at=started)
        if dialect == "responses" and request.is_stored:
            admitted.store_response = functools.partial(
                self._routes.stored.keep, request.prompt.speaker.key, request.body
            )
        exchange.on_disconnect(lambda: _close(admitted.answers))
        exchange.reply_headers.append((SERVED_BY_HEADER, served_here(name).encode("latin-1")))
        if not request.stream:
            exchange.late_headers = lambda: _cache_headers([answer, *others], request.choices)
        try:
            if dialect == "messages" and request.stream:
                await answer.planned()  # the first event reports the cached tokens
            api = DIALECTS[dialect]
            if request.stream:
                events = frames(admitted, api.writer(admitted))
                await exchange.send_events(events, kind=api.media_type)
            else:
                await exchange.send_json(200, await api.whole(admitted))
        finally:
            _close(admitted.answers)
            exchange.counting.callback(
                self._count_ended, exchange, admitted.answers, request, started
            )
            if exchange.has_started:
                exchange.counting.close()
            if unloads:
                self.pool.host.unload(request.target, request.prompt.speaker.key)

    async def _load(
        self, exchange: HttpExchange, dialect: Dialect, body: ClientBody, target: str, unloads: bool
    ) -> None:
        """Answer an Ollama request without a prompt: load the model, or let it be unloaded."""
        model, reason = self._names.model_of(target), "unload" if unloads else "load"
        if unloads:
            self.pool.host.unload(model, api_key_digest(exchange.headers))
        else:
            await exchange.while_connected(self.pool.load(model))
        name = self._names.name_or_default(body.fields.get("model"))
        await exchange.send_json(200, ollama_events.empty_answer(dialect, name, reason))

    async def _open(
        self, request: ParsedRequest, request_id: str, came_at: float
    ) -> list[AnswerStream]:
        """Return the answer of each choice, all admitted.

        The choices are submitted one after the other. Admission waits for rendering only, and the
        worker lets the later choices of a prompt wait for the prefill of the first.

        Raises:
            RequestError: one choice was refused; no answer is left open.
        """
        answers: list[AnswerStream] = []
        try:
            for index, choice in enumerate(request.submissions()):
                choice_id = f"{request_id}-{index}" if index else request_id
                answers.append(await self.pool.open(choice, choice_id, came_at))
        except BaseException:
            _close(answers)
            raise
        return answers

    def _count_ended(
        self,
        exchange: HttpExchange,
        answers: Sequence[AnswerStream],
        request: ParsedRequest,
        started: float,
    ) -> None:
        """Count and log a request that a worker admitted, at its end."""
        exchange.is_counted = True
        broken = exchange.broken_by
        served_by = served_here(request.served_as or self._names.public)
        self._routes.requests.record(request, answers, started, broken)
        answer = answers[0]
        log.info(
            "request id=%s dialect=%s stream=%d served_by=%s prompt=%d cached=%d ended=%s "
            "wall_ms=%d",
            answer.request_id,
            request.dialect,
            request.stream,
            served_by,
            answer.prompt_tokens,
            answer.usage.cached_tokens if answer.usage else answer.cached_tokens,
            answer.outcome(broken)[0],
            (awake_s() - started) * 1000,
        )


def _close(answers: Iterable[AnswerStream]) -> None:
    for answer in answers:
        answer.close()


def _cache_headers(answers: Sequence[AnswerStream], per_prompt: int) -> RawHeaders:
    """Return the header with the answer's cache usage; none if one of its choices broke off."""
    usages = [answer.usage for answer in answers if answer.usage is not None]
    if len(usages) < len(answers):
        return []
    usage = total_usage(usages, per_prompt)
    text = (
        f"hit={usage.cached_tokens} prefilled={usage.prefilled_tokens} source={usage.source} "
        f"ttft_ms={usage.ttft_ms}"
    )
    return [(CACHE_HEADER, text.encode())]
