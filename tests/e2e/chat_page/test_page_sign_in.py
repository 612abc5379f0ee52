"""Attacks the page's sign-in: its cookie is good for the page alone, wherever a request is from."""

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.helpers.chat_page.chat_tab import ChatTab
from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import NEEDS_CHROMIUM, page
from tests.helpers.servers.fake_server import FakeServer

KEY: Final = "the-key"
OTHER: Final = "http://127.0.0.1:8"  # no site in CORS_ORIGINS
CHAT: Final = "/chat/api/v1/chat/completions"
MODELS: Final = "/chat/api/v1/models"
BODY: Final = {"model": "local", "messages": [{"role": "user", "content": "n=1"}]}
Headers = dict[str, str]
ATTACK: Final = """<!doctype html><title>elsewhere</title><pre id=out>running</pre><script>
const server = location.search.slice(1);
const chat = JSON.stringify({messages: [{role: "user", content: "n=1"}]});
const text = {"Content-Type": "text/plain"};
async function attempt(name, path, options) {
  try {
    const told = await fetch(server + path, {credentials: "include", ...options});
    return [name, told.type, told.status];
  } catch { return [name, "blocked", 0]; }
}
(async () => {
  document.title = JSON.stringify([
    await attempt("models", "/chat/api/v1/models", {}),
    await attempt("models unseen", "/chat/api/v1/models", {mode: "no-cors"}),
    await attempt("chat", "/chat/api/v1/chat/completions", {method: "POST", body: chat}),
    await attempt("chat as text", "/chat/api/v1/chat/completions",
      {method: "POST", headers: text, body: chat}),
    await attempt("chat unseen", "/chat/api/v1/chat/completions",
      {method: "POST", mode: "no-cors", headers: text, body: chat}),
    await attempt("sign out", "/chat/sign-in", {method: "DELETE"}),
    await attempt("sign in", "/chat/sign-in",
      {method: "POST", mode: "no-cors", body: new URLSearchParams({key: "the-key"})}),
  ]);
})();
</script>"""


class Site(http.server.BaseHTTPRequestHandler):
    """Serves a page that attacks the server which its query names."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(ATTACK.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def site() -> Iterator[str]:
    """The origin of a page on another port, which a browser takes for the server's own site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture(scope="module")
def listed() -> Iterator[str]:
    """The origin of a site in CORS_ORIGINS."""
    with site() as origin:
        yield origin


@pytest.fixture(scope="module")
def server(listed: str) -> Iterator[FakeServer]:
    settings = {"PROXY_API_KEY": KEY, "PROXY_MODEL_ID": "local", "CORS_ORIGINS": listed}
    with FakeServer(**settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


@pytest.fixture
def stranger(client: httpx.Client) -> httpx.Client:
    """What sends the headers of a test and no others."""
    client.cookies.clear()
    return client


@pytest.fixture(scope="module")
def signed_in(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


@pytest.fixture
def browser(server: FakeServer, signed_in: httpx.Client) -> httpx.Client:
    """What a browser is after its user has signed in, but for the headers that it adds."""
    if not signed_in.cookies:
        own = {"origin": server.url}
        told = signed_in.post("/chat/sign-in", data={"key": KEY}, headers=own)
        assert told.status_code == 200, told.text
    return signed_in


def cookie(browser: httpx.Client) -> str:
    """Return the header that sends the sign-in's cookie to any path, as only an attacker does."""
    ((name, value),) = {(each.name, each.value) for each in browser.cookies.jar}
    return f"{name}={value}"


def test_the_cookie_goes_to_both_pages_and_neither_scripts_nor_other_sites_have_it(
    server: FakeServer, stranger: httpx.Client
) -> None:
    told = stranger.post("/chat/sign-in", data={"key": KEY}, headers={"origin": server.url})
    cookies = [value for name, value in told.headers.multi_items() if name == "set-cookie"]
    paths = sorted(part for each in cookies for part in each.split("; ") if "Path" in part)
    assert paths == ["Path=/chat", "Path=/dashboard"]
    for each in cookies:
        assert {"HttpOnly", "SameSite=Strict"} <= set(each.split("; "))
        assert KEY not in each


def test_the_pages_own_calls_are_answered_by_the_cookie(
    server: FakeServer, browser: httpx.Client
) -> None:
    """The control: without it the refusals below would say nothing."""
    own = {"origin": server.url, "sec-fetch-site": "same-origin"}
    assert browser.post(CHAT, json=BODY, headers=own).status_code == 200
    for site in ("same-origin", "none"):
        assert browser.get(MODELS, headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "listed"},
        {"origin": "listed", "sec-fetch-site": "same-origin"},
        {"origin": "listed", "x-hearth-page": "1"},
        {"origin": OTHER},
        {"origin": OTHER, "x-hearth-page": "1"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "same-site", "x-hearth-page": "1"},
        {"sec-fetch-site": ""},
        {},
    ],
    ids=str,
)
def test_no_other_page_acts_by_the_cookie(
    server: FakeServer, browser: httpx.Client, listed: str, headers: Headers
) -> None:
    headers = {name: listed if value == "listed" else value for name, value in headers.items()}
    before = len(server.events("Submit"))
    for method, path in (("GET", MODELS), ("POST", CHAT)):
        body = BODY if method == "POST" else None
        told = browser.request(method, path, json=body, headers=headers)
        assert told.status_code in (401, 403), (method, headers, told.text)
    assert len(server.events("Submit")) == before


@pytest.mark.parametrize("own", [{}, {"origin": "own", "sec-fetch-site": "same-origin"}], ids=str)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/v1/models", "/v1/cache", "/v1/sessions", "/metrics")),
        *(("POST", path) for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")),
        ("DELETE", "/v1/cache"),
    ],
)
def test_the_api_itself_knows_no_cookie(
    server: FakeServer,
    browser: httpx.Client,
    stranger: httpx.Client,
    method: str,
    path: str,
    own: Headers,
) -> None:
    own = {name: server.url if value == "own" else value for name, value in own.items()}
    body = BODY if method == "POST" else None
    headers = own | {"cookie": cookie(browser), "x-hearth-page": "1"}
    told = stranger.request(method, path, json=body, headers=headers)
    assert told.status_code == 401, told.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/chat/api/v1/cache"),
        ("GET", "/chat/api/v1/cache"),
        ("GET", "/chat/api/metrics"),
        ("GET", "/chat/api/v1/sessions"),
        ("GET", "/chat/api/v1/models/../cache"),
        ("GET", "/chat/api/v1/models/%2e%2e/cache"),
        ("GET", "/chat/api//v1/cache"),
        ("GET", "/chat/api/chat/api/v1/models"),
        ("GET", "/chat/api/dashboard/events"),
        ("GET", "/chat/api/v1"),
        ("POST", "/chat/api/v1/messages"),
        ("POST", "/chat/api/v1/cache/prefill"),
        ("POST", "/chat/api/v1/models"),
        ("GET", CHAT),
    ],
)
def test_the_page_calls_only_what_it_needs(
    server: FakeServer, browser: httpx.Client, method: str, path: str
) -> None:
    body = BODY if method == "POST" else None
    headers = {"origin": server.url} if method != "GET" else {"sec-fetch-site": "same-origin"}
    told = browser.request(method, path, json=body, headers=headers)
    assert told.status_code in (404, 405), (told.status_code, told.text)


def test_a_wrong_key_beside_the_cookie_is_a_wrong_key(
    server: FakeServer, browser: httpx.Client
) -> None:
    for wrong in ({"x-api-key": "no"}, {"authorization": "Bearer no"}):
        told = browser.post(CHAT, json=BODY, headers={"origin": server.url} | wrong)
        assert told.status_code == 401, told.text


def test_a_browser_that_signed_out_is_out_whoever_kept_its_cookie(
    server: FakeServer, browser: httpx.Client, stranger: httpx.Client
) -> None:
    kept = {"cookie": cookie(browser), "origin": server.url}
    assert stranger.post(CHAT, json=BODY, headers=kept).status_code == 200
    told = browser.delete("/chat/sign-in", headers={"origin": server.url})
    assert told.status_code == 200
    assert not list(browser.cookies.jar), "the browser is told to forget it"
    assert stranger.post(CHAT, json=BODY, headers=kept).status_code == 401


@pytest.mark.parametrize("origin", ["listed", OTHER, "null"])
def test_no_other_page_signs_a_browser_in_or_out(
    server: FakeServer, browser: httpx.Client, listed: str, origin: str
) -> None:
    origin = listed if origin == "listed" else origin
    for method in ("POST", "DELETE"):
        told = browser.request(
            method, "/chat/sign-in", data={"key": KEY}, headers={"origin": origin}
        )
        assert told.status_code == 403, told.text
        assert "set-cookie" not in told.headers
    assert browser.post(CHAT, json=BODY, headers={"origin": server.url}).status_code == 200


def test_a_wrong_key_gives_no_cookie_and_is_told_nowhere(
    server: FakeServer, stranger: httpx.Client
) -> None:
    wrong = "a-key-that-is-wrong"
    told = stranger.post("/chat/sign-in", data={"key": wrong}, headers={"origin": server.url})
    assert told.status_code == 401
    assert "set-cookie" not in told.headers
    assert wrong not in told.text + server.log.read_text()
    assert KEY not in server.log.read_text()


async def attacked(server: FakeServer, sites: list[str], devtools: str) -> dict[str, Any]:
    """Sign in with a real browser, then open other sites' pages in it."""
    status = "fetch({!r}, {{headers: {{}}}}).then((told) => told.status)".format
    signing_in = "fetch('/chat/sign-in', {method: 'POST', body: new URLSearchParams({key: '%s'})})"
    told: dict[str, Any] = {}
    async with page(devtools) as tab:
        await tab.open(server.url)
        told["before"] = await tab.value(status(MODELS))
        told["sign in"] = await tab.value(f"{signing_in % KEY}.then((told) => told.status)")
        told["after"] = await tab.value(status(MODELS))
        told["api"] = await tab.value(status("/v1/models"))
        told["scripts see"] = await tab.value("document.cookie")
        for origin in sites:
            await tab.open(f"{origin}/?{server.url}")
            told[origin] = json.loads(
                await tab.until("document.title[0] === '[' && document.title")
            )
        await tab.open(server.url)
        told["in the end"] = await tab.value(status(MODELS))
    return told


@NEEDS_CHROMIUM
def test_in_a_real_browser_pages_of_other_ports_neither_ask_nor_sign_out(
    server: FakeServer, listed: str, devtools: str
) -> None:
    before = len(server.events("Submit"))
    with site() as other:
        told = asyncio.run(attacked(server, [listed, other], devtools))
    seen = [told[name] for name in ("before", "sign in", "after", "api", "in the end")]
    assert seen == [401, 200, 200, 401, 200]
    assert told["scripts see"] == ""
    # A listed site sees that it is refused; of the others a browser tells nothing.
    by_listed = {name: (kind, status) for name, kind, status in told[listed]}
    assert {status for _, status in by_listed.values()} <= {0, 401, 403}, by_listed
    by_other = {name: (kind, status) for name, kind, status in told[other]}
    assert {status for _, status in by_other.values()} == {0}, by_other
    assert len(server.events("Submit")) == before, "a page made the worker compute"


async def asked_for_the_key(server: FakeServer, devtools: str) -> dict[str, Any]:
    """Write a message, sign in by the page's dialog at the second try, send, sign out."""
    told: dict[str, Any] = {}
    open_dialog = "document.querySelector('dialog[open]')?.id === 'sign-in'"
    async with page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        await chat.look("phone")
        await tab.open(server.url)
        await tab.until(open_dialog)
        told["findings"] = await serious_findings(tab)
        await tab.value("document.getElementById('prompt').value = 'n=2 delay=0.01'")
        for key in ("wrong", KEY):
            await tab.value("document.getElementById('key').select()")
            await tab.write(key)
            await tab.press("Enter", "\r")
            if key == "wrong":
                told["wrong"] = await tab.until("document.getElementById('wrong').textContent")
        await tab.until("document.querySelectorAll('#model option').length > 0")
        told["kept"] = await tab.value("document.getElementById('prompt').value")
        told["key left"] = await tab.value("document.getElementById('key').value")
        told["answer"] = await chat.say("")
        await tab.value("document.getElementById('sign-out').click()")
        await tab.until(open_dialog)
        told["out"] = await tab.value(f"fetch('{MODELS}').then((told) => told.status)")
        told["stored"] = await tab.value("JSON.stringify([localStorage, sessionStorage])")
        told["errors"] = [each for each in tab.errors if "401" not in each]
    return told


@NEEDS_CHROMIUM
def test_the_page_asks_for_the_key_and_loses_nothing_that_was_written(
    server: FakeServer, devtools: str
) -> None:
    told = asyncio.run(asked_for_the_key(server, devtools))
    assert not told["findings"]
    assert told["wrong"] and KEY not in told["wrong"]
    assert (told["kept"], told["key left"]) == ("n=2 delay=0.01", "")
    assert told["answer"] == "tok0 tok1"
    assert told["out"] == 401
    assert KEY not in told["stored"]
    assert told["errors"] == []


def test_the_page_loads_from_nowhere_else_and_stands_in_no_frame(stranger: httpx.Client) -> None:
    told = stranger.get("/", headers={"accept": "text/html"})
    assert told.status_code == 200
    policy = [each.strip() for each in told.headers["content-security-policy"].split(";")]
    rules = dict(each.partition(" ")[::2] for each in policy)
    assert rules["default-src"] == "'self'"
    assert (rules["base-uri"], rules["frame-ancestors"]) == ("'none'", "'none'")
    assert rules["form-action"] == "'self'"
    assert set(rules.get("img-src", "").split()) <= {"'self'", "blob:", "data:"}
    assert not {"script-src", "style-src", "connect-src", "script-src-elem"} & set(rules)
    assert told.headers["x-content-type-options"] == "nosniff"
