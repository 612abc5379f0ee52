"""Attacks the page's sign-in at a real server: its cookie is good for the page alone.

tests/unit/proxy/chat_page/test_chat_page_routes.py has the rules, each with its headers.
"""

import asyncio
import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.helpers.cases import cases
from tests.helpers.chat_page.chat_tab import ChatTab
from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import NEEDS_CHROMIUM, page
from tests.helpers.servers.fake_server import FakeServer

KEY: Final = "the-key"
WRONG: Final = "a-key-that-is-wrong"
CHAT: Final = "/chat/api/v1/chat/completions"
MODELS: Final = "/chat/api/v1/models"
BODY: Final = {"model": "local", "messages": [{"role": "user", "content": "n=1"}]}
IS_ASKING: Final = "document.querySelector('dialog[open]')?.id === 'sign-in'"
ATTACK: Final = """<!doctype html><title>elsewhere</title><pre id=out>running</pre><script>
const server = location.search.slice(1);
const chat = JSON.stringify({messages: [{role: "user", content: "n=1"}]});
const text = {"Content-Type": "text/plain"};
async function attempt(path, options) {
  try {
    return (await fetch(server + path, {credentials: "include", ...options})).status;
  } catch { return 0; }
}
(async () => {
  const chats = "/chat/api/v1/chat/completions";
  document.title = JSON.stringify([
    await attempt("/health", {credentials: "omit"}),
    await attempt("/v1/models", {credentials: "omit"}),
    await attempt("/v1/chat/completions",
      {method: "POST", headers: text, body: chat, credentials: "omit"}),
    await attempt("/v1/messages", {method: "POST", mode: "no-cors", headers: text, body: chat}),
    await attempt("/chat/api/v1/models", {}),
    await attempt("/chat/api/v1/models", {mode: "no-cors"}),
    await attempt(chats, {method: "POST", body: chat}),
    await attempt(chats, {method: "POST", headers: text, body: chat}),
    await attempt(chats, {method: "POST", mode: "no-cors", headers: text, body: chat}),
    await attempt("/chat/sign-in", {method: "DELETE"}),
    await attempt("/chat/sign-in",
      {method: "POST", mode: "no-cors", body: new URLSearchParams({key: "the-key"})}),
  ]);
})();
</script>"""


@contextlib.contextmanager
def site(directory: Path) -> Iterator[str]:
    """The origin of a page on another port, which a browser takes for the server's own site."""
    (directory / "index.html").write_text(ATTACK)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a site in CORS_ORIGINS."""
    with site(tmp_path_factory.mktemp("listed")) as origin:
        yield origin


@pytest.fixture(scope="module")
def server(listed: str) -> Iterator[FakeServer]:
    settings = {"PROXY_API_KEY": KEY, "PROXY_MODEL_ID": "local", "CORS_ORIGINS": listed}
    with FakeServer(**settings) as running:
        yield running


@pytest.fixture(scope="module")
def cookie(server: FakeServer) -> str:
    """The cookie of a sign-in as an attacker sends it: to any path."""
    told = httpx.post(
        f"{server.url}/chat/sign-in", data={"key": KEY}, headers={"origin": server.url}
    )
    return told.headers["set-cookie"].partition(";")[0]


@pytest.mark.parametrize("case", cases("chat_page/cookie_refused.yaml"))
def test_who_is_not_the_page_does_nothing_by_its_cookie(
    server: FakeServer, listed: str, cookie: str, case: dict[str, Any]
) -> None:
    own = {"cookie": cookie, "origin": server.url}
    assert httpx.post(server.url + CHAT, json=BODY, headers=own).status_code == 200, "the control"
    before = len(server.events("Submit"))
    origins = {"LISTED": listed, "OWN": server.url}
    headers = {name: origins.get(value, value) for name, value in case["headers"].items()}
    body = BODY if case["method"] == "POST" else None
    told = httpx.request(
        case["method"], server.url + case["path"], json=body, headers=headers | {"cookie": cookie}
    )
    assert told.status_code in case["refused"], told.text
    assert len(server.events("Submit")) == before


async def attacked(server: FakeServer, sites: list[str], devtools: str) -> dict[str, Any]:
    """Sign in with a real browser, then open other sites' pages in it."""
    status = "fetch({!r}, {{headers: {{}}}}).then((told) => told.status)".format
    signing_in = "fetch('/chat/sign-in', {method: 'POST', body: new URLSearchParams({key: '%s'})})"
    asked = (
        status(MODELS),
        f"{signing_in % KEY}.then((told) => told.status)",
        status("/v1/models"),
    )
    told: dict[str, Any] = {}
    async with page(devtools) as tab:
        await tab.open(server.url)
        told["at home"] = [await tab.value(each) for each in asked]
        told["scripts see"] = await tab.value("document.cookie")
        for origin in sites:
            await tab.open(f"{origin}/?{server.url}")
            title = await tab.until("document.title[0] === '[' && document.title")
            health, *rest = json.loads(title)
            told[origin] = (health, set(rest))
        await tab.open(server.url)
        told["in the end"] = await tab.value(status(MODELS))
    return told


@NEEDS_CHROMIUM
def test_in_a_real_browser_pages_of_other_ports_neither_ask_nor_sign_out(
    server: FakeServer, listed: str, devtools: str, tmp_path: Path
) -> None:
    before = len(server.events("Submit"))
    with site(tmp_path) as other:
        told = asyncio.run(attacked(server, [listed, other], devtools))
    assert (told["at home"], told["in the end"]) == ([401, 200, 401], 200)
    assert told["scripts see"] == ""
    health, rest = told[listed]
    assert health == 200, "the control: a listed site may read what is anybody's"
    assert rest <= {0, 401, 403}, "and sees that it is refused all else"
    assert told[other] == (0, {0}), "of the others a browser tells nothing"
    assert len(server.events("Submit")) == before, "a page made the worker compute"


async def asked_for_the_key(server: FakeServer, devtools: str) -> dict[str, Any]:
    """Write a message, sign in by the page's dialog at the second try, send, sign out."""
    told: dict[str, Any] = {}
    async with page(devtools) as tab:
        chat = ChatTab(tab, server.url)
        await chat.look("phone")
        await tab.open(server.url)
        await tab.until(IS_ASKING)
        told["findings"] = await serious_findings(tab)
        await tab.value("document.getElementById('prompt').value = 'n=2 delay=0.01'")
        await chat.type_over("#key", WRONG)
        told["refused"] = await tab.until("document.getElementById('wrong').textContent")
        await chat.type_over("#key", KEY)
        await tab.until("document.querySelectorAll('#model option').length > 0")
        told["key left"] = await tab.value("document.getElementById('key').value")
        told["answer"] = await chat.say("")
        await tab.value("document.getElementById('sign-out').click()")
        await tab.until(IS_ASKING)
        told["out"] = await tab.value(f"fetch('{MODELS}').then((told) => told.status)")
        told["stored"] = await tab.value("JSON.stringify([localStorage, sessionStorage])")
        told["errors"] = [each for each in tab.errors if "401" not in each]
    return told


@NEEDS_CHROMIUM
def test_the_page_asks_for_the_key_and_loses_nothing_that_was_written(
    server: FakeServer, devtools: str
) -> None:
    told = asyncio.run(asked_for_the_key(server, devtools))
    assert not told["findings"] and told["errors"] == []
    assert (told["key left"], told["answer"], told["out"]) == ("", "tok0 tok1", 401)
    log = server.log.read_text()
    for where in (told["refused"], told["stored"], log):
        assert where and KEY not in where and WRONG not in where
