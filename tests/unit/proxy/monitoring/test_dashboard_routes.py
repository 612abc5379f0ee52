"""The dashboard's door: who gets the page, the cookie and the stream, and who does not."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.http.browser_pages import FORM_BYTES_MAX
from hearth.proxy.monitoring import dashboard as dashboard_module
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared.suspending_clock import awake_s
from tests.helpers.proxy.feed_events import ended, request_of
from tests.helpers.proxy.proxy_app import HOST, app_of, ask, asked, cookie_of, sign_in

KEYED = {"PROXY_API_KEY": "secret"}
LOGIN = "/dashboard/login"
EVENTS = "/dashboard/events"


async def first_event(edge: ProxyApp, *headers: tuple[bytes, bytes]) -> str:
    """Return the first event of a stream, whose page goes away then; the stream must end too."""
    async with asyncio.timeout(60):
        reply = await asked(edge, "GET", EVENTS, *headers, gone=asyncio.Event())
    assert edge.routes.feed.listeners == 0, "a stream ends with its page"
    return reply.content.decode()


def note(edge: ProxyApp, key: str) -> None:
    digest = api_key_digest({"x-api-key": key})
    edge.routes.requests.record(request_of(key=digest), [ended(key=digest)], awake_s())


# ---------------------------------------------------------------- the page


def test_without_keys_the_page_is_there_and_with_one_only_its_sign_in(tmp_path: Any) -> None:
    assert b'id="charts"' in ask(app_of(tmp_path), "GET", "/dashboard").content
    closed = ask(app_of(tmp_path, **KEYED), "GET", "/dashboard")
    assert (closed.status, b'id="charts"' in closed.content) == (200, False)
    assert b'type="password"' in closed.content
    with_key = ask(app_of(tmp_path, **KEYED), "GET", "/dashboard/", (b"x-api-key", b"secret"))
    assert b'id="charts"' in with_key.content


@pytest.mark.parametrize("page", ["index.html", "login.html"])
def test_all_that_a_page_names_is_served_from_here_and_none_of_it_is_inline(
    tmp_path: Any, page: str
) -> None:
    edge = app_of(tmp_path)
    text = (Path(dashboard_module.__file__).parent / "pages" / page).read_text()
    named = re.findall(r'(?:src|href|action)="([^"#]+)"', text)
    assert named
    assert all(name.startswith("/dashboard/") or name == "/" for name in named)
    for name in named:
        if name != LOGIN:
            assert ask(edge, "GET", name).status == 200
    assert not re.search(r"<script(?![^>]*src)|<style|\sstyle=|\son\w+=", text)


def test_every_reply_says_what_a_browser_may_do_with_it(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    for path in ("/dashboard", "/dashboard/charts.js", "/dashboard/none", EVENTS):
        headers = ask(edge, "GET", path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/dashboard", 200),
        ("POST", "/dashboard", 405),
        ("GET", LOGIN, 405),
        ("DELETE", LOGIN, 405),
        ("HEAD", EVENTS, 405),
        ("POST", EVENTS, 405),
        ("GET", "/dashboard/none.js", 404),
        ("GET", "/dashboard/index.html", 404),
        ("GET", "/dashboard/../edge.py", 404),
        ("GET", "/dashboard/vendor/../../edge.py", 404),
        ("GET", "/dashboard//etc/passwd", 404),
        ("GET", "/dashboards", 404),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Any, method: str, path: str, status: int) -> None:
    assert ask(app_of(tmp_path), method, path).status == status


# ---------------------------------------------------------------- the sign-in


def test_a_key_gives_a_cookie_that_no_script_and_no_other_site_can_use(tmp_path: Any) -> None:
    reply = sign_in(app_of(tmp_path, **KEYED), LOGIN, "secret")
    assert (reply.status, reply.headers["location"]) == (303, "/dashboard")
    value, *attributes = reply.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/dashboard"} <= set(attributes)
    assert any(re.fullmatch(r"Max-Age=\d+", each) for each in attributes)
    name, _, token = value.partition("=")
    assert name.endswith("4000"), "a browser gives a cookie to all ports of a host"
    assert len(token) >= 40
    assert "secret" not in value


def test_the_cookie_opens_the_page_and_the_stream_and_nothing_else(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    cookie = cookie_of(sign_in(edge, LOGIN, "secret"))
    assert b'id="charts"' in ask(edge, "GET", "/dashboard", cookie).content
    assert "event: snapshot" in asyncio.run(first_event(edge, cookie))
    for path in ("/v1/models", "/v1/cache", "/v1/sessions", "/", "/metrics"):
        assert ask(edge, "GET", path, cookie).status == 401
    assert ask(edge, "POST", "/v1/chat/completions", cookie, body=b"{}").status == 401


@pytest.mark.parametrize("key", ["", "wrong", "secre", "secret2", "ä", "\u2028"])
def test_a_wrong_key_gives_no_cookie_and_says_so(tmp_path: Any, key: str) -> None:
    reply = sign_in(app_of(tmp_path, **KEYED), LOGIN, key)
    assert reply.status == 401
    assert "set-cookie" not in reply.headers
    assert b'role="alert"' in reply.content


@pytest.mark.parametrize("cookie", ["", "x", "hearth-4000=", "hearth-4000=guess", '="; ;;=\\'])
def test_a_made_up_cookie_opens_nothing(tmp_path: Any, cookie: str) -> None:
    edge = app_of(tmp_path, **KEYED)
    sign_in(edge, LOGIN, "secret")
    refused = ask(edge, "GET", EVENTS, (b"cookie", cookie.encode()))
    assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
    assert (
        b'id="charts"' not in ask(edge, "GET", "/dashboard", (b"cookie", cookie.encode())).content
    )


@pytest.mark.parametrize("other", ['a={"b": "c"}', "x", "a b=c d", '="', "ä=ö", 'q="un;closed'])
def test_another_servers_cookies_on_this_host_do_not_hide_ours(tmp_path: Any, other: str) -> None:
    edge = app_of(tmp_path, **KEYED)
    _, ours = cookie_of(sign_in(edge, LOGIN, "secret"))
    for both in (other.encode() + b"; " + ours, ours + b"; " + other.encode()):
        assert b'id="charts"' in ask(edge, "GET", "/dashboard", (b"cookie", both)).content


@pytest.mark.parametrize("key", ["voilà", "Å", "a b", "x+y&z=%", "名前"])
def test_any_key_that_the_api_takes_signs_in(tmp_path: Any, key: str) -> None:
    edge = app_of(tmp_path, PROXY_API_KEY=key)
    assert ask(edge, "GET", "/v1/models", (b"x-api-key", key.encode())).status == 200
    assert sign_in(edge, LOGIN, f" {key}\r\n").status == 303


def test_a_form_that_is_no_sign_in_is_refused_and_not_kept(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    for length in (FORM_BYTES_MAX + 1, 10**17):
        reply = ask(edge, "POST", LOGIN, (b"content-length", b"%d" % length), body=b"key=secret")
        assert reply.status == 413
        reply = ask(edge, "POST", LOGIN, body=b"key=" + b"s" * FORM_BYTES_MAX)
        assert reply.status == 413
        assert f"{FORM_BYTES_MAX:,}" in reply.json["error"]["message"]


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("key", ["one", "two"])
def test_with_several_keys_a_sign_in_shows_its_own_keys_requests(tmp_path: Any, key: str) -> None:
    edge = app_of(tmp_path, **{"PROXY_API_KEYS": "one,two"})
    note(edge, "one")
    note(edge, "two")
    note(edge, "two")
    count = {"one": 1, "two": 2}[key]
    cookie = cookie_of(sign_in(edge, LOGIN, key))
    for header in (cookie, (b"x-api-key", key.encode())):
        told = asyncio.run(first_event(edge, header))
        assert told.count('"number":') == count
        assert f'"totals":{{"requests":{count}' in told


# ---------------------------------------------------------------- the stream


async def test_a_page_that_does_not_read_is_dropped_and_counted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(dashboard_module, "SEND_WAIT_S_MAX", 0.01)
    edge = app_of(tmp_path)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # as with a full buffer

    scope = {"type": "http", "method": "GET", "path": EVENTS, "scheme": "http"}
    async with asyncio.timeout(60):
        await edge(scope | {"headers": [HOST]}, receive, send)
    assert edge.routes.feed.listeners == 0 and "has read nothing" in caplog.text
