"""Killed workers, clients that leave, prompts in each other's way."""

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest

from tests.helpers.servers.server import Server

KILLS = 20 if os.environ.get("HEARTH_EXAMPLES") else 6
DISCONNECTS = 50


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of this module's own: its worker is killed."""
    with Server() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="local", messages=[{"role": "user", "content": text}], temperature=0, **options
    )


def answered_within(client: openai.OpenAI, wait_s: float) -> float:
    """Return the seconds until a short request is answered; errors are tried again."""
    began = time.monotonic()
    while True:
        try:
            ask(client, "are you back?", max_tokens=2)
            return time.monotonic() - began
        except openai.APIStatusError as error:
            assert error.status_code == 503, error
            assert time.monotonic() - began < wait_s, "the worker did not come back"
            time.sleep(0.1)


def test_a_killed_worker_is_an_error_at_once_and_comes_back(
    server: Server, client: openai.OpenAI
) -> None:
    assert server.process is not None
    proxy_pid = server.process.pid
    errors, returns = [], []
    for number in range(KILLS):
        pid = server.worker()["pid"]
        stream = ask(client, f"kill {number}", max_tokens=4000, stream=True)
        for _ in range(random.Random(number).randrange(1, 30)):
            next(stream)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        errors.append(time.monotonic() - killed)
        assert "worker" in str(caught.value)
        answered_within(client, 30)
        returns.append(time.monotonic() - killed)
    print(f"error after {max(errors):.2f} s at most, back after {max(returns):.2f} s at most")
    assert max(errors) < 2
    assert max(returns) < 10
    assert server.process.poll() is None and server.process.pid == proxy_pid
    assert server.worker()["restarts"] == KILLS


def raw_request(server: Server, body: dict[str, Any], path: str) -> socket.socket:
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(head.encode() + payload)
    return connection


def array_bytes(server: Server) -> int:
    """Return what MLX's arrays take: Python's objects and malloc's reserves are not in it."""
    (row,) = server.get("/v1/cache")["workers"]
    return int(row["memory_bytes"] - row["beside_arrays_bytes"])


def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    server: Server, client: openai.OpenAI
) -> None:
    answered_within(client, 30)
    ask(client, "warm up " * 500, max_tokens=20)
    server.forget()  # what was computed for those that left is kept, which is another test's
    server.wait_until_idle()
    memory = array_bytes(server)
    chance = random.Random(1)
    pid = server.worker()["pid"]
    for number in range(DISCONNECTS):
        body = {
            "model": "local",
            "messages": [{"role": "user", "content": f"{number} leave " * chance.choice([5, 900])}],
            "max_tokens": 3000,
            "stream": number % 3 != 0,
        }
        path = chance.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses"])
        if path == "/v1/responses":
            body["input"] = body.pop("messages")
            body["max_output_tokens"] = body.pop("max_tokens")
        connection = raw_request(server, body, path)
        time.sleep(chance.random() * 0.5)
        connection.close()
    server.wait_until_idle()
    ask(client, "next", max_tokens=2)
    server.forget()
    server.wait_until_idle()
    assert server.worker()["pid"] == pid
    assert array_bytes(server) <= memory * 1.05 + 1_000_000


def test_the_worker_is_idle_again_when_its_client_has_left(
    server: Server, client: openai.OpenAI
) -> None:
    answered_within(client, 30)
    body = {"model": "local", "max_tokens": 4000, "stream": True}
    body["messages"] = [{"role": "user", "content": "leave"}]
    waits = []
    for _ in range(5):
        connection = raw_request(server, body, "/v1/chat/completions")
        assert b"data:" in connection.recv(65536) + connection.recv(65536)
        left = time.monotonic()
        connection.close()
        usage_stops_growing(server)
        waits.append(time.monotonic() - left)
    print(f"freed after {sorted(waits)[2]:.2f} s in the median (heartbeats come each second)")


def usage_stops_growing(server: Server) -> None:
    """Wait until the worker's CPU is idle: its steps end when the request does."""
    worker = psutil.Process(server.worker()["pid"])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        before = sum(worker.cpu_times()[:2])
        time.sleep(0.1)
        if sum(worker.cpu_times()[:2]) - before <= 0.02:
            return
    raise AssertionError("the worker still computes 30 s after its client left")


def test_a_short_request_is_not_behind_a_long_prefill(
    server: Server, client: openai.OpenAI
) -> None:
    answered_within(client, 30)
    times: dict[str, float] = {}

    def first_token(name: str, text: str) -> None:
        stream = ask(client, text, max_tokens=3, stream=True)
        for chunk in stream:
            delta = chunk.choices[0].delta if chunk.choices else None
            if delta and (delta.content or getattr(delta, "reasoning_content", None)):
                times.setdefault(name, time.monotonic())

    long = threading.Thread(target=first_token, args=("long", "long story " * 3000))
    long.start()
    deadline = time.monotonic() + 60
    while server.worker()["running"] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    first_token("short", "quick question")
    long.join()
    assert times["short"] < times["long"]
