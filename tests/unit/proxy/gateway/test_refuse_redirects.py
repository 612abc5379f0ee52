"""A redirect of a model's server is an error that is told; nothing is sent to where it leads."""

import asyncio
import inspect
from collections.abc import Iterator

import aiohttp
import httpx
import pytest
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler
from litellm.llms.openai.common_utils import BaseOpenAILLM
from litellm.proxy._types import ProxyException

from hearth.proxy.gateway.cloud.cloud_failure import failure_of
from hearth.proxy.gateway.refuse_redirects import refuse_redirects

ELSEWHERE = "http://elsewhere.test/v1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The hosts that were asked; the clients of this process are put back behind the test."""
    location = httpx.Response.has_redirect_location
    monkeypatch.setattr(httpx.Response, "has_redirect_location", location)
    monkeypatch.setattr(aiohttp.ClientSession, "post", aiohttp.ClientSession.post)
    refuse_redirects()
    yield []


def redirecting(asked: list[str], status: int) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(status, headers={"location": ELSEWHERE})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_client_follows_a_redirect_and_the_error_says_what_to_set(
    asked: list[str], status: int
) -> None:
    transport = redirecting(asked, status)
    with httpx.Client(transport=transport, follow_redirects=True) as client:
        answers = [client.post("http://named.test", json={"prompt": "x"})]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport) as other:
            return await other.post("http://named.test", follow_redirects=True)

    answers.append(asyncio.run(ask()))
    assert asked == ["named.test", "named.test"]
    for answer in answers:
        with pytest.raises(httpx.HTTPStatusError):
            answer.raise_for_status()
        error = ProxyException("", "api_error", None, code=status)
        found = failure_of(error, answer.status_code, b"")
        assert (found.kind, found.status) == ("error", 502)
        assert "Set api_base" in found.text and str(status) in found.text


def test_who_looks_at_redirects_himself_sees_them(asked: list[str]) -> None:
    with httpx.Client(transport=redirecting(asked, 302), follow_redirects=True) as client:
        answer = client.get("http://image.test", follow_redirects=False)
    assert answer.status_code == 302 and answer.headers["location"] == ELSEWHERE


def test_litellm_still_makes_clients_that_follow_redirects() -> None:
    """Once it does not, or has a setting for it, refuse_redirects.py can go."""
    for handler in (HTTPHandler, AsyncHTTPHandler):
        assert inspect.signature(handler).parameters["follow_redirects"].default is True

    async def made() -> bool:
        client = BaseOpenAILLM.get_async_http_client()  # what OpenAI's SDK is given
        assert client is not None
        async with client:
            return client.follow_redirects

    assert asyncio.run(made())
