"""Clients that ask for long answers and read nothing: what they hold, and whom they delay."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx
import psutil
import pytest

from tests.helpers.servers.audited_server import GENERATE, body_of, text_of
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.server import WAIT_S_MAX, until

MESSAGES: Final = "/v1/messages"
WORDS: Final = 1_500  # of each long answer,
WIDE: Final = 6_000  # characters each: more than the system's own buffers hold of a connection
DELAY_S: Final = 0.003  # between two of them
LONG: Final = f"n={WORDS} wide={WIDE} delay={DELAY_S}"
SHORT: Final = "n=3 delay=0.01"
SHORT_MIN: Final = 3  # that must have been answered beside them


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def ask_and_leave(server: FakeServer, path: str, text: str) -> socket.socket:
    """Return a connection on which a request was sent and nothing will be read by itself."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.settimeout(60)
    client.connect(("127.0.0.1", server.port))
    body = json.dumps(body_of(path, text, 30_000, stream=True)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def read_late(client: socket.socket) -> str:
    """Return the text of a streamed answer, read from its beginning."""
    response = http.client.HTTPResponse(client)
    response.begin()
    rows = [line[6:] for line in response.read().splitlines() if line.startswith(b"data: {")]
    return "".join(text_of(json.loads(row)) for row in rows)


def short_answers(server: FakeServer, is_over: threading.Event) -> int:
    """Ask for short answers, one after the other, until told to stop; return how many came."""
    count = 0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while not is_over.is_set() or count < SHORT_MIN:
            reply = client.post(MESSAGES, json=body_of(MESSAGES, SHORT, stream=True))
            assert "tok2" in reply.text and "message_stop" in reply.text
            count += 1
    return count


def long_ones(server: FakeServer, since: float) -> list[str]:
    """Return the long requests that a worker has sent the last word of."""
    long = {
        row["request_id"]
        for row in server.events("Submit", since)
        if LONG in json.dumps(row["prompt"])
    }
    return [row["request_id"] for row in server.events("done", since) if row["request_id"] in long]


def test_who_reads_nothing_holds_little_delays_nobody_and_reads_all_of_it_later(
    fake: FakeServer,
) -> None:
    whole = "".join(f"tok{number} ".ljust(WIDE) for number in range(WORDS))
    proxy = psutil.Process(fake.process.pid if fake.process else 0)
    began, before = time.time(), proxy.memory_info().rss
    is_over = threading.Event()
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ask_and_leave(fake, path, LONG)) for path in GENERATE]
        stack.callback(is_over.set)
        others = pool.submit(short_answers, fake, is_over)
        # The workers are done with the long ones: nothing holds them back.
        until(lambda: len(long_ones(fake, began)) == len(clients), wait_s=3 * WAIT_S_MAX)
        grown = proxy.memory_info().rss - before
        is_over.set()
        assert others.result() >= SHORT_MIN, "others were answered in the meantime"
        assert [read_late(client) for client in clients] == [whole] * len(clients)
    assert grown < 2 * len(clients) * len(whole), "the answers' text, and what it comes with"
