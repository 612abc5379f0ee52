"""No client of LiteLLM follows a redirect or keeps a cookie; who looks at redirects sees them.

That no redirect takes anything elsewhere is tested at the real server
(e2e/gateway/test_unnamed_servers.py).
"""

from collections.abc import Iterator

import aiohttp
import httpx
import pytest

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
