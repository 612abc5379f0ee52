"""The page's door: who gets the page, who signs in, and whose calls the cookie lets in."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.chat_page import chat_page_routes
from hearth.proxy.request.session_id import PAGE_HEADER
from tests.helpers.proxy.proxy_app import app_of, ask, cookie_of, sign_in

KEYED = {"PROXY_API_KEY": "secret"}
SIGN_IN = "/chat/sign-in"
MODELS = "/chat/api/v1/models"
CHAT = "/chat/api/v1/chat/completions"
LISTED = "http://app.example:3000"
BROWSER = (b"accept", b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")
OWN = (b"origin", b"http://127.0.0.1:4000")
SAME = (b"sec-fetch-site", b"same-origin")
PAGE = (PAGE_HEADER.encode(), b"1")
PAGES = Path(chat_page_routes.__file__).parent / "pages"


def signed_in(edge: ProxyApp, key: str = "secret") -> tuple[bytes, bytes]:
    return cookie_of(sign_in(edge, SIGN_IN, key, OWN))


# ---------------------------------------------------------------- the page


def test_a_browser_at_the_servers_address_gets_the_page_and_a_program_json(tmp_path: Any) -> None:
    edge = app_of(tmp_path)
    reply = ask(edge, "GET", "/", BROWSER)
    assert reply.status == 200 and b'id="prompt"' in reply.content
    for accept in ([], [(b"accept", b"*/*")], [(b"accept", b"application/json")]):
        assert ask(edge, "GET", "/", *accept).json["name"] == "hearth"
    assert ask(edge, "POST", "/", BROWSER).status == 405
    assert ask(edge, "HEAD", "/", BROWSER).content == b""


def test_the_page_and_its_files_need_no_key_and_tell_a_stranger_nothing(tmp_path: Any) -> None:
    closed, open_ = app_of(tmp_path, **KEYED), app_of(tmp_path)
    for path in (
        "/",
        *(name for name in open_.chat_page.files.by_path if not name.endswith(".html")),
    ):
        shown = ask(closed, "GET", path, BROWSER)
        assert (shown.status, shown.content) == (200, ask(open_, "GET", path, BROWSER).content)
    assert ask(closed, "GET", "/").status == 401


def test_all_that_the_page_names_is_served_from_here_and_none_of_it_is_inline(
    tmp_path: Any,
) -> None:
    edge = app_of(tmp_path)
    text = (PAGES / "index.html").read_text()
    named = set(re.findall(r'(?:src|href|action)="([^"#]+)"', text))
    for script in PAGES.glob("*.js"):
        found = re.findall(r'(?:from |import |import\()"([./][^"]+)"', script.read_text())
        named |= {name.replace("./", "/chat/", 1) for name in found}
    assert "/dashboard" in named and "/chat/vendor/highlight.min.js" in named
    for name in named:
        assert ask(edge, "GET", name).status == 200, name
    assert not re.search(r"<script(?![^>]*src)|<style|\sstyle=|\son\w+=", text)


def test_nothing_that_is_served_names_another_host(tmp_path: Any) -> None:
    for path, (_, content) in app_of(tmp_path).chat_page.files.by_path.items():
        hosts = set(re.findall(rb"(?:https?:)?//[a-z0-9-]+\.[a-z0-9.-]*[a-z]{2,}", content))
        assert not hosts - {b"http://www.w3.org", b"https://github.com"}, path


def test_what_is_vendored_is_what_its_table_says() -> None:
    table = (PAGES / "vendor" / "README.md").read_text()
    scripts = list((PAGES / "vendor").glob("*.js"))
    assert len(scripts) == 3
    for script in scripts:
        digest = hashlib.sha256(script.read_bytes()).hexdigest()
        assert re.search(rf"^\| `{re.escape(script.name)}` .*{digest} \|$", table, re.MULTILINE)


def test_every_reply_says_what_a_browser_may_do_with_it(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    for path in ("/", "/chat/chat.js", "/chat/vendor/purify.min.js", SIGN_IN):
        headers = ask(edge, "GET", path, BROWSER).headers
        policy = dict(
            row.strip().partition(" ")[::2] for row in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'self'"
        assert policy["img-src"] == "'self' blob: data:", "no picture is loaded from elsewhere"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-dns-prefetch-control"] == "off", "no link's host is asked after unclicked"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", SIGN_IN, 405),
        ("POST", "/chat/chat.js", 405),
        ("GET", "/chat/index.html", 404),
        ("GET", "/chat/none.js", 404),
        ("GET", "/chat/vendor/../../app.py", 404),
        ("GET", "/chat", 404),
        ("GET", "/chat/api", 404),
        ("GET", "/chat/api/v1/sessions", 404),
        ("GET", "/chat/api/metrics", 404),
        ("DELETE", "/chat/api/v1/cache", 404),
        ("GET", "/chat/api/chat/api/v1/models", 404),
        ("POST", MODELS, 405),
        ("GET", CHAT, 405),
        ("GET", "/chat/completions", 405),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Any, method: str, path: str, status: int) -> None:
    assert ask(app_of(tmp_path), method, path, OWN).status == status


def test_without_keys_the_page_calls_the_api_without_a_sign_in(tmp_path: Any) -> None:
    edge = app_of(tmp_path)
    assert ask(edge, "GET", SIGN_IN).json == {"needs_key": False, "is_signed_in": False}
    assert ask(edge, "GET", MODELS).json == ask(edge, "GET", "/v1/models").json
    assert ask(edge, "GET", "/chat/api/health").json["version"] == "0"
    through_page = ask(edge, "POST", CHAT, OWN, body=b"{}")
    direct = ask(edge, "POST", "/v1/chat/completions", body=b"{}")
    assert (through_page.status, through_page.json) == (direct.status, direct.json)


# ---------------------------------------------------------------- the sign-in


def test_who_signs_out_is_known_no_more(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    cookie, other = signed_in(edge), signed_in(edge)
    reply = ask(edge, "DELETE", SIGN_IN, cookie, OWN)
    assert (reply.status, reply.json["is_signed_in"]) == (200, False)
    assert "Max-Age=0" in reply.headers["set-cookie"]
    assert ask(edge, "GET", MODELS, cookie, SAME).status == 401
    assert ask(edge, "GET", MODELS, other, SAME).status == 200


# ---------------------------------------------------------------- whose calls


def test_the_cookie_acts_below_the_pages_path_and_nowhere_else(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    cookie = signed_in(edge)
    assert ask(edge, "GET", MODELS, cookie, SAME).status == 200
    assert ask(edge, "POST", CHAT, cookie, OWN, body=b"[]").status == 400, "it is let in, and read"
    for path in ("/v1/models", "/v1/cache", "/v1/sessions", "/metrics"):
        assert ask(edge, "GET", path, cookie, SAME, PAGE).status == 401
    for path in ("/v1/chat/completions", "/chat/completions", "/v1/messages"):
        assert ask(edge, "POST", path, cookie, OWN, PAGE, body=b"{}").status == 401


@pytest.mark.parametrize(
    ("method", "headers", "is_let_in"),
    [
        ("GET", [SAME], True),
        ("GET", [(b"sec-fetch-site", b"none")], True),
        ("GET", [OWN], True),
        ("GET", [PAGE], True),
        ("GET", [], False),
        ("GET", [(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate")], False),
        ("GET", [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")], False),
        ("GET", [(b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"navigate"), PAGE], False),
        ("GET", [(b"origin", LISTED.encode()), PAGE], False),
        ("POST", [OWN], True),
        ("POST", [OWN, SAME], True),
        ("POST", [], False),
        ("POST", [SAME], False),
        ("POST", [PAGE], False),
        ("POST", [(b"origin", LISTED.encode())], False),
        ("POST", [(b"origin", LISTED.encode()), SAME, PAGE], False),
    ],
)
def test_only_this_servers_own_page_acts_by_the_cookie(
    tmp_path: Any, method: str, headers: list[tuple[bytes, bytes]], is_let_in: bool
) -> None:
    edge = app_of(tmp_path, **KEYED, CORS_ORIGINS=LISTED)
    cookie = signed_in(edge)
    path = MODELS if method == "GET" else CHAT
    status = ask(edge, method, path, cookie, *headers, body=b"[]").status
    assert status == ({"GET": 200, "POST": 400}[method] if is_let_in else 401)
    with_key = ask(edge, method, path, (b"x-api-key", b"secret"), *headers, body=b"[]")
    site = dict(headers).get(b"sec-fetch-site", b"")
    assert with_key.status == {"GET": 200, "POST": 400}[method], site


def test_a_listed_sites_page_signs_nobody_in_or_out(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED, CORS_ORIGINS=LISTED)
    cookie = signed_in(edge)
    listed = (b"origin", LISTED.encode())
    assert sign_in(edge, SIGN_IN, "secret", listed).status == 403
    assert ask(edge, "DELETE", SIGN_IN, cookie, listed).status == 403
    assert not ask(edge, "GET", SIGN_IN, cookie, listed).json["is_signed_in"]
    assert ask(edge, "GET", MODELS, cookie, SAME).status == 200


def test_a_key_that_is_sent_goes_before_the_cookies(tmp_path: Any) -> None:
    edge = app_of(tmp_path, **KEYED)
    cookie = signed_in(edge)
    for header in ((b"x-api-key", b"wrong"), (b"authorization", b"Bearer wrong")):
        assert ask(edge, "GET", MODELS, cookie, SAME, header).status == 401


def test_each_sign_in_acts_by_its_own_key(tmp_path: Any) -> None:
    edge = app_of(tmp_path, PROXY_API_KEYS="one,two")
    digests = []
    noted = edge.routes.serve

    async def noting(exchange: Any) -> None:
        digests.append(exchange.headers["x-api-key"])
        assert not any(name == b"cookie" for name, _ in exchange.raw_headers)
        await noted(exchange)

    edge.routes.serve = noting  # type: ignore[method-assign]
    for key in ("one", "two"):
        assert ask(edge, "GET", MODELS, signed_in(edge, key), SAME).status == 200
    assert digests == ["one", "two"]
