"""No client of LiteLLM follows a redirect, and those who look at redirects see them.

That no redirect takes anything elsewhere is tested at the real server
(e2e/gateway/test_unnamed_servers.py).
"""

import asyncio
import inspect

import aiohttp
import httpx
import pytest
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, HTTPHandler
from litellm.llms.openai.common_utils import BaseOpenAILLM

from hearth.proxy.gateway.refuse_redirects import refuse_redirects

ELSEWHERE = "http://elsewhere.test/v1"


def test_who_looks_at_redirects_himself_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in (
        *((httpx.Client, "send"), (httpx.AsyncClient, "send"), (aiohttp.ClientSession, "post")),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # put back behind the test
    refuse_redirects()
    moved = httpx.MockTransport(lambda _: httpx.Response(302, headers={"location": ELSEWHERE}))
    with httpx.Client(transport=moved, follow_redirects=True) as client:
        assert client.get("http://image.test").status_code == 502
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
