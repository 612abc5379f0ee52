"""No client of LiteLLM follows a redirect or keeps a cookie; who looks at redirects sees them.

That no redirect takes anything elsewhere is tested at the real server
(e2e/gateway/test_unnamed_servers.py).
"""

import asyncio
import inspect
from collections.abc import Iterator

import aiohttp
import httpx
import pytest
import yarl
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler
from litellm.llms.openai.common_utils import BaseOpenAILLM

from hearth.proxy.gateway.refuse_redirects import refuse_redirects

ELSEWHERE = "http://elsewhere.test/v1"


@pytest.fixture(autouse=True)
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind, name in (
        *((httpx.Cookies, "extract_cookies"), (aiohttp.CookieJar, "update_cookies")),
        (aiohttp.ClientSession, "post"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # put back behind the test
    refuse_redirects()
    yield
    for client in (httpx.Client, httpx.AsyncClient):
        del client.max_redirects


def test_who_looks_at_redirects_himself_sees_them() -> None:
    asked = []

    def moved(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(302, headers={"location": ELSEWHERE, "set-cookie": "a=b"})

    transport = httpx.MockTransport(moved)
    with httpx.Client(transport=transport, follow_redirects=True, max_redirects=9) as client:
        with pytest.raises(httpx.TooManyRedirects):
            client.get("http://image.test")
        answer = client.get("http://image.test", follow_redirects=False)
    assert answer.status_code == 302 and answer.headers["location"] == ELSEWHERE
    assert asked == ["image.test"] * 2


def test_a_providers_cookie_does_not_come_with_the_next_request() -> None:
    """It would tell the provider that two keys' requests are of one server's user."""
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("cookie"))
        return httpx.Response(200, headers={"set-cookie": "a=b; path=/"})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        for _ in range(2):
            client.get("http://model.test")
    assert sent == [None, None]

    async def kept() -> int:
        jar = aiohttp.CookieJar(unsafe=True)
        jar.update_cookies({"a": "b"}, yarl.URL("http://model.test"))
        return len(jar)

    assert asyncio.run(kept()) == 0


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
