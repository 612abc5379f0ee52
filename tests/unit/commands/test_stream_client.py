"""Whatever a server answers is an outcome: garbage, answers without an end, lists of nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st

from hearth.commands.stream_client import (
    COUNT_MAX,
    READERS,
    Outcome,
    Reading,
    send,
    tokens_of,
)

pytestmark = pytest.mark.process
KEYS = ("choices", "delta", "usage", "content", "error", "type", "message", "response", "text")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)
COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")


@given(
    st.sampled_from(sorted(READERS)),
    st.dictionaries(st.sampled_from((*COUNTS, "prompt_tokens_details")), JSON, min_size=1),
    st.dictionaries(st.sampled_from(("prefilled", "source")), JSON),
)
def test_any_usage_counts_or_is_none(
    dialect: str, usage: dict[str, Any], kv_cache: dict[str, Any]
) -> None:
    tokens = tokens_of(dialect, Reading(usage=usage, kv_cache=kv_cache))
    if tokens is not None:
        counts = (tokens.prompt, tokens.cached, tokens.prefilled, tokens.completion)
        assert all(type(each) is int and 0 <= each <= 3 * COUNT_MAX for each in counts)
        assert isinstance(tokens.source, str)


async def asked(body: AsyncIterator[bytes], status: int, dialect: str) -> Outcome:
    """Return the outcome of a request that is answered with `body`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        try:
            async for part in body:
                await response.write(part)
        except (ConnectionError, aiohttp.ClientError):
            pass  # the client has gone
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await send(session, str(server.make_url("/")), dialect, {}, {})


async def parts(*texts: str) -> AsyncIterator[bytes]:
    for text in texts:
        yield text.encode()


@pytest.mark.parametrize("dialect", sorted(READERS))
@pytest.mark.parametrize("event", ["5", "[]", "null", "{", "[" * 100_000, '{"choices": [1]}'])
def test_garbage_is_a_failed_request_and_is_not_repeated(dialect: str, event: str) -> None:
    outcome = asyncio.run(asked(parts(f"data: {event}\n\n"), 200, dialect))
    told = (f"unreadable event of {len(event)} characters", "the stream broke off")
    assert not outcome.is_answered and outcome.error in told
