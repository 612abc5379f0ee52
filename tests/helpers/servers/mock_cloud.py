"""Serves OpenAI's and Anthropic's APIs from scripts, as strict about bodies as the real ones are.

It runs in a thread of the test's process with an event loop of its own. Every request is recorded
with its raw body, and the time at which a client left it.
"""

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aiohttp import web

from tests.helpers.cloud import anthropic_bodies, anthropic_replies, openai_bodies, openai_replies
from tests.helpers.cloud.cloud_answers import (
    HELLO,
    CloudAnswer,
    CloudError,
    Dialect,
    Place,
    RefusedBodyError,
    error_body,
    no_model,
    wrong_key,
)
from tests.helpers.cloud.cloud_memory import CloudMemory, CloudUsage
from tests.helpers.cloud.openai_replies import CloudReply
from tests.helpers.cloud.responses_bodies import check_responses
from tests.helpers.cloud.responses_replies import error_event, responses_reply

KEY: Final = "sk-mock-cloud-key"
BODY_BYTES_MAX: Final = 64 << 20
START_S_MAX: Final = 60.0
FLUSH_S: Final = 0.1
PATHS: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
}
COUNT_PATH: Final = "/v1/messages/count_tokens"


@dataclass
class CloudRequest:
    """One request as it came. Owner: the mock's event loop; a test reads it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    at: float = field(default_factory=time.monotonic)
    status: int = 0
    left_at: float | None = None  # the client closed before the answer's end
    ended_at: float | None = None
    usage: CloudUsage = CloudUsage(0, 0, 0)

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    @property
    def model(self) -> str:
        return str(self.json.get("model"))


Rule = Callable[[CloudRequest], CloudAnswer | None]


class MockCloud:
    """One cloud account; use as a context manager.

    The answer to a request is the first of `queue`, or what `rule` says, or that of its model in
    `answers`, or HELLO. `models` are the names that are served, all where there are none.
    """

    def __init__(self, key: str = KEY, models: Iterable[str] = ()) -> None:
        self.key = key
        self.models = tuple(models)
        self.requests: list[CloudRequest] = []
        self.queue: list[CloudAnswer] = []
        self.answers: dict[str, CloudAnswer] = {}
        self.rule: Rule | None = None
        self.memory = CloudMemory()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="mock cloud", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_S_MAX)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S_MAX)
        assert not self._thread.is_alive()

    # ------------------------------------------------------------ for tests

    def say(self, *answers: CloudAnswer) -> None:
        """Have the next requests answered so, one after another."""
        self.queue.extend(answers)

    def forget(self) -> None:
        """Drop all records and scripts; what was given out stays known."""
        self.requests.clear()
        self.queue.clear()
        self.answers.clear()
        self.rule = None

    def generations(self) -> list[CloudRequest]:
        return [request for request in self.requests if request.path in PATHS]

    def until(self, condition: Callable[[], Any], wait_s: float = 10.0) -> Any:
        deadline = time.monotonic() + wait_s
        while not (found := condition()):
            assert time.monotonic() < deadline, [vars(request) for request in self.requests]
            time.sleep(0.01)
        return found

    # ------------------------------------------------------------ the server

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        record = CloudRequest(
            request.method,
            request.path,
            request.query_string,
            {name.lower(): value for name, value in request.headers.items()},
            await request.read(),
        )
        self.requests.append(record)
        try:
            response = await self._routed(request, record)
        except (asyncio.CancelledError, ConnectionError):
            record.left_at = time.monotonic()
            raise
        record.ended_at = time.monotonic()
        record.status = response.status
        return response

    async def _routed(self, request: web.Request, record: CloudRequest) -> web.StreamResponse:
        is_anthropic = "anthropic-version" in record.headers
        dialect = PATHS.get(record.path, "messages" if is_anthropic else "chat")
        try:
            self._check_key(record)
            if record.path == "/v1/models":
                return web.json_response(self._models(record))
            if record.path == COUNT_PATH:
                return web.json_response(self._count(record))
            if record.path not in PATHS or record.method != "POST":
                raise RefusedBodyError(CloudError(404, f"Not found: {record.path}"))
            make = self._checked(dialect, record)
            answer = self._next_answer(record)
            return await _Sender(request, record, dialect).send(answer, make)
        except RefusedBodyError as refusal:
            return _error(dialect, refusal.error)

    def _check_key(self, record: CloudRequest) -> None:
        given = record.headers.get("authorization", "").removeprefix("Bearer ")
        given = given or record.headers.get("x-api-key", "")
        if given != self.key:
            raise RefusedBodyError(wrong_key(given))

    def _checked(
        self, dialect: Dialect, record: CloudRequest
    ) -> Callable[[CloudAnswer], CloudReply]:
        """Return what writes the answer to a body that the service takes."""
        try:
            body = record.json
        except ValueError:
            text = "We could not parse the JSON body of your request."
            raise RefusedBodyError(CloudError(400, text)) from None
        if self.models and body.get("model") not in self.models:
            raise RefusedBodyError(no_model(str(body.get("model"))))
        memory = self.memory
        if dialect == "chat":
            openai_bodies.check_chat(body)
            return functools.partial(openai_replies.chat_reply, body, memory=memory)
        if dialect == "completions":
            openai_bodies.check_completions(body)
            return functools.partial(openai_replies.completions_reply, body, memory=memory)
        if dialect == "embeddings":
            openai_bodies.check_embeddings(body)
            return lambda _answer: openai_replies.embeddings_reply(body)
        if dialect == "messages":
            is_beta = "anthropic-beta" in record.headers
            anthropic_bodies.check_messages(body, memory, is_beta=is_beta)
            return functools.partial(anthropic_replies.messages_reply, body, memory=memory)
        items = check_responses(body, memory)
        return functools.partial(responses_reply, body, items, memory=memory)

    def _next_answer(self, record: CloudRequest) -> CloudAnswer:
        if self.queue:
            return self.queue.pop(0)
        ruled = self.rule(record) if self.rule is not None else None
        return ruled or self.answers.get(record.model, HELLO)

    def _models(self, record: CloudRequest) -> dict[str, Any]:
        if "anthropic-version" in record.headers:
            rows = [{"type": "model", "id": name, "display_name": name} for name in self.models]
            return {"data": rows, "has_more": False, "first_id": None, "last_id": None}
        rows = [{"object": "model", "id": name, "owned_by": "mock"} for name in self.models]
        return {"object": "list", "data": [{**row, "created": 0} for row in rows]}

    def _count(self, record: CloudRequest) -> dict[str, Any]:
        body = record.json
        is_beta = "anthropic-beta" in record.headers
        anthropic_bodies.check_messages(body, self.memory, is_beta=is_beta, counts=True)
        units = anthropic_replies.units_of(body)
        return {"input_tokens": CloudMemory().usage("", units, "", "").prompt}


def _error(dialect: Dialect, error: CloudError) -> web.Response:
    body = error_body(dialect, error)
    return web.json_response(body, status=error.status, headers=dict(error.headers))


class _Sender:
    """Sends one answer as its script says, with every way of breaking off."""

    def __init__(self, request: web.Request, record: CloudRequest, dialect: Dialect) -> None:
        self._request = request
        self._record = record
        self._dialect = dialect
        self._is_stream = record.json.get("stream") is True

    async def send(
        self, answer: CloudAnswer, make: Callable[[CloudAnswer], CloudReply]
    ) -> web.StreamResponse:
        await asyncio.sleep(answer.first_s)
        await self._break_off(answer, "before the head")
        if answer.error is not None and answer.error_place == "before the head":
            return _error(self._dialect, answer.error)
        reply = make(answer)
        self._record.usage = reply.usage
        if self._is_stream:
            return await self._stream(answer, reply.events)
        content = json.dumps(reply.whole).encode()
        response = web.StreamResponse(headers=self._headers("application/json"))
        response.content_length = len(content)
        await response.prepare(self._request)
        await self._break_off(answer, "behind the head")
        await response.write(content[: len(content) // 2])
        await self._break_off(answer, "amid the text")
        await response.write(content[len(content) // 2 :])
        await response.write_eof()
        return response

    async def _stream(self, answer: CloudAnswer, events: tuple[bytes, ...]) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._headers("text/event-stream; charset=utf-8"))
        await response.prepare(self._request)
        await self._break_off(answer, "behind the head")
        for number, event in enumerate(events):
            if number == len(events) // 2:
                await self._break_off(answer, "amid the text")
            if answer.error is not None and number == self._error_at(answer, len(events)):
                await response.write(self._error_event(answer.error))
                break
            await asyncio.sleep(answer.piece_s)
            await response.write(event)
        await response.write_eof()
        return response

    def _error_at(self, answer: CloudAnswer, count: int) -> int:
        return 0 if answer.error_place == "behind the head" else count // 2

    def _error_event(self, error: CloudError) -> bytes:
        if self._dialect == "messages":
            return anthropic_replies.error_event(error)
        if self._dialect == "responses":
            return error_event(error)
        return openai_replies.data(error_body(self._dialect, error))

    def _headers(self, kind: str) -> dict[str, str]:
        return {"content-type": kind, "x-request-id": "req_mock", "request-id": "req_mock"}

    async def _break_off(self, answer: CloudAnswer, place: Place) -> None:
        """Close the connection here, or stay until the client leaves, where the script says so."""
        if answer.hangs == place:
            await asyncio.Event().wait()
        if answer.drops == place:
            if place != "before the head":
                await asyncio.sleep(FLUSH_S)  # what was written is to arrive
            transport = self._request.transport
            assert transport is not None
            transport.abort()
            raise ConnectionResetError("dropped, as the script says")
