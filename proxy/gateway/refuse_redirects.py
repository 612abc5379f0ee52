"""Has no HTTP client of LiteLLM follow a redirect: only addresses that a config names are reached.

A redirect would take the prompt, and Anthropic's key, to a host in no config. LiteLLM makes most
of its clients with `follow_redirects=True`, which no setting of it turns off. So no answer of httpx
has an address to follow, nor is one followed by aiohttp, for `aiohttp_openai/`: LiteLLM takes a
redirect for an error. Where it fetches an image it looks at each `is_redirect` and address itself.
"""

import functools
from typing import Any

import aiohttp
import httpx


def refuse_redirects() -> None:
    """Change the clients of this process."""
    answer: Any = httpx.Response
    answer.has_redirect_location = False
    session: Any = aiohttp.ClientSession
    options: Any = {"allow_redirects": False, "raise_for_status": _refuse}
    session.post = functools.partialmethod(session.post, **options)


async def _refuse(answer: aiohttp.ClientResponse) -> None:
    if 300 <= answer.status < 400:
        raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status)
