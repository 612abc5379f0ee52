"""A page from another origin, in a real browser, against the running server."""

import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.clients.browser import CHROMIUM, NEEDS_CHROMIUM
from tests.helpers.servers.server import Server

PAGE = """<!doctype html><title>other origin</title><pre id=out>running</pre><script>
const base = "%s";
async function attempt(name, path, options) {
  try {
    const answer = await fetch(base + path, options);
    return name + ": " + answer.type + " " + answer.status + " " + await answer.text();
  } catch (error) { return name + ": blocked"; }
}
const chat = JSON.stringify({model: "local", max_tokens: 50,
  messages: [{role: "user", content: "from another origin"}]});
(async () => {
  const rows = [
    await attempt("read models", "/v1/models", {}),
    await attempt("read health", "/health", {}),
    await attempt("chat as json", "/v1/chat/completions",
      {method: "POST", headers: {"Content-Type": "application/json"}, body: chat}),
    await attempt("chat as text", "/v1/chat/completions",
      {method: "POST", headers: {"Content-Type": "text/plain"}, body: chat}),
    await attempt("chat unseen", "/v1/chat/completions",
      {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}, body: chat}),
    await attempt("messages unseen", "/v1/messages",
      {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}, body: chat}),
  ];
  document.getElementById("out").textContent = rows.join("\\n");
})();
</script>"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the page that attacks the server named in its query."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((PAGE % self.path.partition("?")[2]).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    """The origin of a page that tries everything, on another port."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_address[1]}"
        site.shutdown()


def browse(url: str, profile: Path) -> str:
    """Return the page's DOM after its scripts ran, in headless Chromium."""
    assert CHROMIUM is not None
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@NEEDS_CHROMIUM
def test_a_page_of_another_origin_can_neither_read_nor_generate(
    server: Server, page: str, tmp_path: Path
) -> None:
    server.wait_until_idle()
    steps = server.worker()["steps"]
    dom = browse(f"{page}/?{server.url}", tmp_path)
    assert "chat unseen" in dom, dom
    for name in ("read models", "read health", "chat as json", "chat as text"):
        assert f"{name}: blocked" in dom, dom
    server.wait_until_idle()
    assert server.worker()["steps"] == steps, "a page made the worker compute"


@NEEDS_CHROMIUM
def test_the_same_page_can_read_and_generate_where_its_origin_is_listed(
    page: str, tmp_path: Path
) -> None:
    """The control: without the rule the page would get through."""
    with Server(CORS_ORIGINS=page) as server:
        dom = browse(f"{page}/?{server.url}", tmp_path)
        assert "read models: cors 200" in dom, dom
        assert "chat as text: cors 200" in dom, dom
