"""Stops LiteLLM's HTTP clients from following redirects and from keeping cookies.

A redirect would send the prompt, and Anthropic's key, to a host that no config names. A cookie
would let a provider link the requests of two keys. LiteLLM makes most of its clients with
`follow_redirects=True`, which no setting turns off, and OpenAI's client with a cookie jar. So this
module sets `max_redirects`, public in httpx and aiohttp, so that every client refuses redirects.
For images LiteLLM follows redirects itself and checks each address, which still works.
"""

from typing import Any

import aiohttp
import httpx


def refuse_redirects() -> None:
    """Patch the HTTP clients of this process; calling it again changes nothing."""
    post = aiohttp.ClientSession.post

    def aiohttp_post(self: aiohttp.ClientSession, url: Any, **options: Any) -> Any:
        return post(self, url, **options | {"max_redirects": 1})  # the first raises

    none: Any = property(lambda client: 0, lambda client, asked: None)
    httpx.Client.max_redirects = none
    httpx.AsyncClient.max_redirects = none
    httpx.Cookies.extract_cookies = lambda *_: None  # type: ignore[method-assign]
    aiohttp.CookieJar.update_cookies = lambda *_: None  # type: ignore[method-assign]
    aiohttp.ClientSession.post = aiohttp_post  # type: ignore[method-assign]
