"""Asks a server in every dialect, and runs one whose processes log every file that they open."""

import http.client
import json
from typing import Any

from tests.helpers.servers.server import Server

MINE, THEIRS = "sk-canary-mine", "sk-canary-theirs"

KEPT = {"kv", "responses"}  # directories in which the text of answers is, for their owner alone
AUDIT = """
import os, sys
fd = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def audit(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename"):
        os.write(fd, (repr(arguments[0]) + "\\n").encode("utf-8", "replace"))
sys.addaudithook(audit)
"""
WORKER = (
    AUDIT + "from hearth.worker.main import main\ncode = main()\nsys.stderr.flush()\nos._exit(code)"
)
PROXY = (
    AUDIT + "os.umask(0)\nfrom hearth.proxy.main import end, main\n"
    f"end(main([sys.executable, '-c', {WORKER!r}]))"
)
GENERATE = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}


def ask(
    server: Server, method: str, path: str, body: Any = None, key: str | None = MINE, **more: str
) -> tuple[int, bytes]:
    """Send one request; `more` are headers, whose underscores stand for dashes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    payload = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, payload, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def body_of(path: str, text: str, tokens: int = 16, **more: Any) -> dict[str, Any]:
    """Return a body of the dialect of `path`, whose answer has so many `tokens` at most."""
    field = GENERATE[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    said: Any = text if field != "messages" else [{"role": "user", "content": text}]
    return {"model": "local", field: said, limit: tokens} | more


def text_of(event: dict[str, Any]) -> str:
    """Return what an event of any dialect's stream appends to the answer."""
    if "delta" in event:
        delta = event["delta"]
        return str(delta if type(delta) is str else delta.get("text", ""))
    rows = event.get("choices", [])
    return "".join(row.get("text") or row.get("delta", {}).get("content") or "" for row in rows)
