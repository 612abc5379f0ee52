"""Serves OpenAI's and Anthropic's APIs from scripts, as strict about bodies as the real ones are.

Fields are those of the providers' own SDKs; what was signed, sealed or named is taken back only
from whom it was given to, and only as it was. Every request is recorded with its raw body. It runs
in a thread of the test's process with an event loop of its own, and takes two paths more: to
/callbacks a user's logging tool posts, and what lies below /307/ (any status) is redirected.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

from aiohttp import web

from tests.helpers.cloud.cloud_answers import (
    HELLO,
    CloudAnswer,
    CloudError,
    CloudMemory,
    CloudUsage,
    Place,
    Row,
)
from tests.helpers.cloud.cloud_bodies import RefusedBody, check_body
from tests.helpers.cloud.cloud_replies import REPLIES, data, event, units

KEY: Final = "sk-mock-cloud-key"
START_S_MAX: Final = 60.0
FLUSH_S: Final = 0.1
PATHS: Final = {
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

    path: str
    query: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    status: int = 0
    has_left: bool = False  # the client closed before the answer's end
    is_answered: bool = False
    usage: CloudUsage = CloudUsage(0, 0, 0)

    @property
    def json(self) -> Row:
        return dict(json.loads(self.body))

    @property
    def model(self) -> str:
        return str(self.json.get("model"))


class MockCloud:
    """One cloud account; use as a context manager.

    The answer to a request is the first of `queue`, or that of its model in `answers`, or HELLO.
    """

    def __init__(self) -> None:
        self.redirects_to = ""
        self.memory = CloudMemory()
        self.forget()
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="mock cloud", daemon=True)

    def forget(self) -> None:
        """Drop all records and scripts; what was given out stays known."""
        self.requests: list[CloudRequest] = []
        self.queue: list[CloudAnswer] = []
        self.answers: dict[str, CloudAnswer] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_S_MAX)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START_S_MAX)
        assert not self._thread.is_alive()

    # ------------------------------------------------------------ for tests

    def say(self, *answers: CloudAnswer) -> None:
        """Have the next requests answered so, one after another."""
        self.queue.extend(answers)

    def generations(self) -> list[CloudRequest]:
        return [request for request in self.requests if request.path in PATHS]

    def rows(self) -> list[Any]:
        """Return what was posted to /callbacks; LiteLLM loses rows of before it reads an answer."""
        found = [each for each in self.requests if each.path == "/callbacks" and each.is_answered]
        return [row for each in found for row in json.loads(each.body)]

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
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        record = CloudRequest(request.path, request.query_string, headers, await request.read())
        self.requests.append(record)
        try:
            response = await self._routed(request, record)
            record.status = response.status
            await response.prepare(request)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            record.has_left = True
            raise
        record.is_answered = True
        return response

    async def _routed(self, request: web.Request, record: CloudRequest) -> web.StreamResponse:
        if record.path == "/callbacks":
            return web.Response()
        if re.match(r"/30\d/", record.path):
            headers = {"location": self.redirects_to + record.path}
            return web.Response(status=int(record.path[1:4]), headers=headers)
        is_beta = "anthropic-beta" in record.headers
        dialect = "messages" if "anthropic-version" in record.headers else "chat"
        dialect = PATHS.get(record.path, dialect)
        try:
            _check_key(record)
            if record.path == COUNT_PATH:
                check_body("count", record.json, self.memory, is_beta=is_beta)
                count = CloudMemory().usage("", units(record.json), HELLO).prompt
                return web.json_response({"input_tokens": count})
            if record.path not in PATHS or request.method != "POST":
                raise RefusedBody(CloudError(404, f"Not found: {record.path}"))
            check_body(dialect, record.json, self.memory, is_beta=is_beta)
            return await self._sent(request, record, dialect)
        except RefusedBody as refusal:
            error = refusal.error
        body = error.body(dialect)
        return web.json_response(body, status=error.status, headers=dict(error.headers))

    async def _sent(
        self, request: web.Request, record: CloudRequest, dialect: str
    ) -> web.StreamResponse:
        """Send an answer as its script says, with every way of breaking off."""
        answer = self.queue.pop(0) if self.queue else self.answers.get(record.model, HELLO)
        is_stream = record.json.get("stream")
        await _break_off(request, answer, "before the head")
        if answer.error is not None and answer.error_place == "before the head":
            raise RefusedBody(answer.error)
        whole, events, record.usage = REPLIES[dialect](record.json, answer, self.memory)
        told = {"x-request-id": "req_mock", "set-cookie": "a=b; Path=/"}
        response = web.StreamResponse(headers=told)
        response.content_type = "text/event-stream" if is_stream else "application/json"
        if not is_stream:
            content = json.dumps(whole).encode()
            response.content_length = len(content)
            events = [content[: len(content) // 2], content[len(content) // 2 :]]
        await response.prepare(request)
        await _break_off(request, answer, "behind the head")
        for number, piece in enumerate(events):
            if number == len(events) // 2:
                await _break_off(request, answer, "amid the text")
                if answer.error is not None:
                    await response.write(_error_event(dialect, answer.error))
                    break
            await response.write(piece)
        return response


def _check_key(record: CloudRequest) -> None:
    given = record.headers.get("authorization", "").removeprefix("Bearer ")
    given = given or record.headers.get("x-api-key", "")
    if given != KEY:  # which is repeated, as OpenAI does in part
        text = f"Incorrect API key provided: {given}. Find yours at https://example.com."
        raise RefusedBody(CloudError(401, text, "invalid_api_key", "authentication_error"))


def _error_event(dialect: str, error: CloudError) -> bytes:
    if dialect == "responses":
        told = {"type": "error", "sequence_number": 99, "code": error.code, "param": None}
        return event(told | {"message": error.message})
    return (event if dialect == "messages" else data)(error.body(dialect))


async def _break_off(request: web.Request, answer: CloudAnswer, place: Place) -> None:
    """Close the connection here, or stay until the client leaves, where the script says so."""
    if answer.hangs == place:
        await asyncio.Event().wait()
    if answer.drops == place:
        if place != "before the head":
            await asyncio.sleep(FLUSH_S)  # what was written is to arrive
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("dropped, as the script says")
