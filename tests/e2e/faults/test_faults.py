"""Killed workers, and clients that leave."""

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.servers.audited_server import GENERATE, body_of
from tests.helpers.servers.leaving_clients import Leaving
from tests.helpers.servers.server import Server, until

PATHS = [path for path in GENERATE if path != "/v1/completions"]
DISCONNECTS = 30


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


def until_answered(client: openai.OpenAI) -> None:
    """Ask until the worker is back; meanwhile it is said that it is not."""

    def is_back() -> bool:
        try:
            return bool(ask(client, "are you back?", max_tokens=2))
        except openai.APIStatusError as error:
            assert error.status_code == 503, error
            return False

    until(is_back)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.night)])
def test_a_killed_worker_is_an_error_at_once_and_comes_back(
    server: Server, client: openai.OpenAI, kills: int
) -> None:
    assert server.process is not None
    before = server.worker()["restarts"]
    for number in range(kills):
        pid = server.worker()["pid"]
        stream = ask(client, f"kill {number}", max_tokens=4000, stream=True)
        for _ in range(random.Random(number).randrange(1, 30)):
            next(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="worker"):
            list(stream)
        until_answered(client)
    assert server.process.poll() is None
    assert server.worker()["restarts"] - before == kills


def array_bytes(server: Server) -> int:
    """Return what MLX's arrays take: Python's objects and malloc's reserves are not in it."""
    (row,) = server.get("/v1/cache")["workers"]
    return int(row["memory_bytes"] - row["beside_arrays_bytes"])


def emptied(server: Server, client: openai.OpenAI) -> int:
    """Return what the arrays take once nothing runs and nothing is kept."""
    ask(client, "next", max_tokens=2)
    server.forget()
    server.wait_until_idle()
    return array_bytes(server)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    server: Server, client: openai.OpenAI
) -> None:
    until_answered(client)
    ask(client, "warm up " * 500, max_tokens=20)
    memory, pid, chance = emptied(server, client), server.worker()["pid"], random.Random(1)
    for number in range(DISCONNECTS):
        path, text = chance.choice(PATHS), f"{number} leave " * chance.choice([5, 900])
        leaving = Leaving(server, path, body_of(path, text, 3_000, stream=number % 3 != 0))
        time.sleep(chance.random() * 0.3)
        leaving.leave()
    server.wait_until_idle()
    assert emptied(server, client) <= memory * 1.05 + 1_000_000
    assert server.worker()["pid"] == pid
