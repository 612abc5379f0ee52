"""Checks how the relay handles replies, errors and bugs of LiteLLM, with a stand-in for its app."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hearth.proxy.api import chat_completions
from hearth.proxy.gateway.litellm_relay import Broken, Relay
from hearth.proxy.gateway.litellm_warm_up import CannedAnswer
from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.request.parsed_request import AdmittedRequest, current_request
from hearth.shared.errors import RequestError, WorkerLost

OK = {"type": "http.response.start", "status": 200, "headers": [(b"x-litellm-cost", b"0")]}
DONE = {"type": "http.response.body", "body": b""}


class Sink:
    def __init__(self) -> None:
        self.status = 0
        self.headers: Any = None
        self.chunks: list[bytes] = []

    async def start(self, status: int, headers: Any) -> None:
        self.status, self.headers = status, headers

    async def body(self, chunk: bytes, *, more: bool) -> None:
        self.chunks.append(chunk)


def ticket(stream: bool = True) -> AdmittedRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
    return AdmittedRequest(chat_completions.parse(body), "m", CannedAnswer())


def serve(
    app: Callable[..., Awaitable[None]], made: AdmittedRequest, *, gone: bool = False
) -> Sink:
    sink = Sink()

    async def run() -> None:
        left = asyncio.Event()
        if gone:
            left.set()
        await Relay(app, "token").serve(made, sink, left)

    asyncio.run(run())
    return sink


def test_the_app_sees_the_ticket_the_token_and_nothing_of_the_client() -> None:
    made = ticket()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert current_request.get() is made
        assert scope["path"] == "/v1/chat/completions"
        assert dict(scope["headers"])[b"authorization"] == b"Bearer token"
        assert (await receive())["more_body"] is False
        await send(OK)
        await send(DONE)

    sink = serve(app, made)
    assert (sink.status, sink.headers) == (200, [])


def test_an_error_of_litellms_is_ours_to_tell() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**OK, "status": 429})
        await send({**DONE, "body": b"litellm.RateLimitError"})

    with pytest.raises(Broken) as caught:
        serve(app, ticket())
    assert caught.value.status == 500
    made = ticket()
    made.failure = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        serve(app, made)


def test_no_reply_at_all_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    with pytest.raises(Broken):
        serve(app, ticket())


def test_a_bug_in_litellm_is_passed_on_unless_the_client_left() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        serve(app, ticket())
    with pytest.raises(ClientGone):
        serve(app, ticket(), gone=True)


def test_an_error_in_the_stream_is_told_in_our_words() -> None:
    made = ticket()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(OK)
        await send({**DONE, "body": b'data: {"error": "answer"}\n\n', "more_body": True})
        made.failure = RequestError("ours", status=500, code="c")
        await send({**DONE, "body": b'data: {"error": {"message": "litellm..."}}\n\n'})

    first, second = serve(app, made).chunks
    assert b"answer" in first  # nothing had failed yet
    assert second.startswith(b'data: {"error":{"message":"ours"')


def test_each_event_of_a_chat_stream_is_made_exact() -> None:
    made = ticket()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(OK)
        event = b'data: {"created": 1, "choices": [{"index": 0, "delta": {}}]}\n\n'
        await send({**DONE, "body": event + event, "more_body": True})
        usage = b'data: {"created": 2, "choices": [{}], "usage": {"a": 1}}\n\ndata: [DONE]\n\n'
        await send({**DONE, "body": usage})

    two, last = serve(app, made).chunks
    rows = [json.loads(event.removeprefix(b"data: ")) for event in two.split(b"\n\n")[:-1]]
    assert [row["choices"][0]["finish_reason"] for row in rows] == [None, None]
    usage, done, rest = last.split(b"\n\n")
    assert json.loads(usage.removeprefix(b"data: "))["choices"] == []
    assert json.loads(usage.removeprefix(b"data: "))["created"] == rows[0]["created"]
    assert (done, rest) == (b"data: [DONE]", b"")


def test_a_whole_answer_is_made_exact_with_the_length_that_it_then_has() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**OK, "headers": [(b"content-length", b"1"), (b"content-type", b"x")]})
        await send({**DONE, "body": b'{"choices": [{"mess', "more_body": True})
        await send({**DONE, "body": b'age": {}}]}'})

    sink = serve(app, ticket(stream=False))
    (body,) = sink.chunks
    assert json.loads(body)["choices"][0]["message"]["content"] is None
    headers = [(b"content-type", b"x"), (b"content-length", str(len(body)).encode())]
    assert sink.headers == headers
