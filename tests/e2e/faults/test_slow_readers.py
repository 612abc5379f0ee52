"""Clients that ask for long answers and read nothing: what they hold, and whom they delay."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.helpers.servers.fake_server import FakeServer

WORDS: Final = 1_500  # of each long answer,
WIDE: Final = 6_000  # characters each: more than the system's own buffers hold of a connection
DELAY_S: Final = 0.003  # between two of them
LONG: Final = f"n={WORDS} wide={WIDE} delay={DELAY_S}"
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": []},
    "/v1/completions": {},
    "/v1/messages": {"messages": [], "max_tokens": 30_000},
    "/v1/responses": {},
}
# Seconds in which nothing is read once the answers are whole.
SILENCES: Final = [
    0.0,
    pytest.param(
        60.0,
        marks=pytest.mark.skipif(
            "HEARTH_EXAMPLES" not in os.environ, reason="a minute: HEARTH_EXAMPLES asks for it"
        ),
    ),
]


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def body_of(path: str, text: str) -> dict[str, Any]:
    told: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == "/v1/completions":
        told = {"prompt": text}
    elif path == "/v1/responses":
        told = {"input": text}
    return {"model": "local", "stream": True, **BODIES[path], **told}


def ask_and_leave(server: FakeServer, path: str, text: str) -> socket.socket:
    """Return a connection on which a request was sent and nothing will be read by itself."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    body = json.dumps(body_of(path, text)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def read_late(client: socket.socket) -> str:
    """Return the text of a streamed answer, read from its beginning."""
    with client, client.makefile("rb") as file:
        while file.readline().strip():
            pass
        stream = b"".join(_chunks(file))
    rows = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(text_of(json.loads(row)) for row in rows)


def _chunks(file: Any) -> Iterator[bytes]:
    while size := int(file.readline(), 16):
        yield file.read(size)
        file.readline()


def text_of(event: dict[str, Any]) -> str:
    """Return what an event of any dialect appends to the answer."""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    rows = event.get("choices", [])
    return "".join(row.get("text") or row.get("delta", {}).get("content") or "" for row in rows)


def short_answers(server: FakeServer, is_over: threading.Event) -> list[float]:
    """Ask for short answers, one after the other, until told to stop; return what each took."""
    took = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while not is_over.is_set():
            began = time.monotonic()
            reply = client.post("/v1/messages", json=body_of("/v1/messages", "n=3 delay=0.01"))
            assert "tok2" in reply.text and "message_stop" in reply.text
            took.append(time.monotonic() - began)
    return took


@pytest.mark.parametrize("silence_s", SILENCES)
def test_who_reads_nothing_holds_little_delays_nobody_and_reads_all_of_it_later(
    fake: FakeServer, silence_s: float
) -> None:
    whole = "".join(f"tok{number} ".ljust(WIDE) for number in range(WORDS))
    proxy = psutil.Process(fake.process.pid if fake.process else 0)
    began, before = time.time(), proxy.memory_info().rss
    is_over = threading.Event()
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        clients = [ask_and_leave(fake, path, LONG) for path in BODIES]
        for client in clients:
            stack.enter_context(client)
        stack.callback(is_over.set)
        others = pool.submit(short_answers, fake, is_over)
        # The workers are done with the long ones: nothing holds them back.
        fake.until(lambda: len(answered(fake, began)) == len(clients), wait_s=120)
        time.sleep(silence_s)
        grown = proxy.memory_info().rss - before
        is_over.set()
        took = others.result()
        assert [read_late(client) for client in clients] == [whole] * len(clients)
    assert grown < 2 * len(clients) * len(whole), "the answers' text, and what it comes with"
    assert len(took) > 10, "others were answered in the meantime"
    print(
        f"{len(clients)} clients read nothing for {silence_s:g} s: {grown / 2**20:.1f} MB in the "
        f"proxy; {len(took)} other answers took {sorted(took)[len(took) // 2]:.3f} s in the "
        f"median, {max(took):.3f} s at most"
    )


def answered(server: FakeServer, since: float) -> list[str]:
    """Return the long requests that a worker has sent the last word of."""
    long = {
        row["request_id"]
        for row in server.events("Submit", since)
        if LONG in json.dumps(row["prompt"])
    }
    return [row["request_id"] for row in server.events("done", since) if row["request_id"] in long]
