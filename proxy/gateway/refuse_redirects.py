"""Has no HTTP client of LiteLLM follow a redirect, or keep a cookie: both would go to others.

A redirect would take the prompt, and Anthropic's key, to a host in no config; a cookie would tell a
provider of one key's requests in another's. LiteLLM makes most of its clients with
`follow_redirects=True`, which no setting of it turns off, and OpenAI's with a jar of cookies. So
`max_redirects`, public in httpx and aiohttp, is none for all of them. Where LiteLLM asks for no
redirects it looks at each address itself, as for an image that it fetches.
"""

from typing import Any

import aiohttp
import httpx


def refuse_redirects() -> None:
    """Set the clients of this process; to do so twice changes nothing more."""
    post = aiohttp.ClientSession.post

    def aiohttp_post(self: aiohttp.ClientSession, url: Any, **options: Any) -> Any:
        return post(self, url, **options | {"max_redirects": 1})  # the first raises

    none: Any = property(lambda client: 0, lambda client, asked: None)
    httpx.Client.max_redirects = none
    httpx.AsyncClient.max_redirects = none
    httpx.Cookies.extract_cookies = lambda *_: None  # type: ignore[method-assign]
    aiohttp.CookieJar.update_cookies = lambda *_: None  # type: ignore[method-assign]
    aiohttp.ClientSession.post = aiohttp_post  # type: ignore[method-assign]
