"""A machine that sleeps for eight hours amid everything: each request has one end, and goes on."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.make_keys import make_keys
from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.clients.scraped_metrics import families_of, series_of, total
from tests.helpers.servers.server import WAIT_S_MAX, Server, free_port
from tests.helpers.servers.sleeping_machine import SIGNALS, THIS

# Of each two one goes to each worker: what decodes, what is prefilled, what waits for a slot.
WORDS = (20, 20, 400, 400, 40, 40)
ANSWER_TOKENS = 40


class SleepingServer(Server):
    """A proxy, a worker of its own and one behind tcp:// and CURVE, all on one machine."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.slow = directory / "slow"
        make_keys(directory / "keys")
        super().__init__(
            MODEL_PATH=str(fixture_dir("qwen3")),
            PROXY_MODEL_ID="local",
            WORKER_ENDPOINTS=self.endpoint,
            CURVE_KEYS_DIR=str(directory / "keys"),
            DEFAULT_THINKING="false",
            LIVE_SLOTS_MAX="2",
            PREFILL_CHUNK="64",
            SLOW_WHILE=str(self.slow),
        )
        self.remote: subprocess.Popen[bytes] | None = None

    def start(self, *command: str) -> None:
        super().start("-m", THIS)
        own = f"ipc://{self.run_dir}/remote.sock"
        options = ["--worker-id", "9", "--endpoint", own, "--listen", self.endpoint]
        with self.log.open("ab") as log:
            self.remote = subprocess.Popen(
                [sys.executable, "-m", THIS, *options],
                cwd=PROJECT_DIR,
                env=self.environment,
                stdin=subprocess.PIPE,  # a worker ends with its supervisor's end of it
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __exit__(self, *_: object) -> None:
        assert self.remote is not None and self.remote.stdin is not None
        self.remote.terminate()
        self.remote.wait(WAIT_S_MAX)
        self.remote.stdin.close()
        super().__exit__()

    def sleep(self, kind: str) -> None:
        """Put all processes to sleep; the proxy is the last to wake."""
        assert self.process is not None and self.remote is not None
        for pid in (self.remote.pid, self.worker()["pid"]):
            os.kill(pid, SIGNALS[kind])
        time.sleep(0.5)
        os.kill(self.process.pid, SIGNALS[kind])

    def caches(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.get("/v1/cache")["workers"]]


class Talk(threading.Thread):
    """One session's request, a long prompt and a streamed answer."""

    def __init__(self, server: Server, session: str, history: list[dict[str, str]]) -> None:
        super().__init__()
        self.server, self.session, self.history = server, session, history
        self.text = self.error = ""
        self.tokens_max = ANSWER_TOKENS
        self.ends: list[str] = []
        self.prompt = self.cached = -1  # tokens

    def following(self) -> "Talk":
        """Return the session's next request."""
        said = {"role": "assistant", "content": self.text}
        more = [*self.history, said, {"role": "user", "content": "Go on."}]
        following = Talk(self.server, self.session, more)
        following.tokens_max = 2
        return following

    def run(self) -> None:
        try:
            with self.server.openai() as client:
                stream = client.chat.completions.create(
                    model="local",
                    messages=self.history,  # type: ignore[arg-type]
                    stream=True,
                    stream_options={"include_usage": True},
                    max_tokens=self.tokens_max,
                    extra_headers={"x-session-id": self.session},
                )
                for event in stream:
                    for choice in event.choices:
                        self.text += choice.delta.content or ""
                        self.ends += [choice.finish_reason] if choice.finish_reason else []
                    if event.usage is not None and event.usage.prompt_tokens_details is not None:
                        self.prompt = event.usage.prompt_tokens
                        self.cached = event.usage.prompt_tokens_details.cached_tokens or 0
        except Exception as error:  # told by the assertion on it
            self.error = repr(error)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SleepingServer]:
    made = SleepingServer(tmp_path)
    try:
        made.start()
        made.wait_until_ready()
        until(lambda: [row["state"] for row in made.health()["workers"]] == ["ready", "ready"])
        yield made
    finally:
        made.__exit__()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def opening(number: int, count: int) -> list[dict[str, str]]:
    words = " ".join(f"{number}-{word}" for word in range(count))
    return [{"role": "user", "content": words}]


def half_sent(server: Server) -> tuple[http.client.HTTPConnection, bytes]:
    """Return a connection with the first half of a request's body, and the other half."""
    message = {"role": "user", "content": "Half of this is sent before the sleep. " * 20}
    body = json.dumps({"model": "local", "messages": [message], "max_tokens": 2}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S_MAX)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body[:100])
    return connection, body[100:]


def bad_ends(server: Server) -> float:
    """Return how many requests were refused, broke off, were cancelled or had their time."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S_MAX) as answer:
        series = series_of(families_of(answer.read().decode()).values())
    kinds = ("cancelled", "failed", "refused_4xx", "refused_5xx")
    ends = sum(total(series, "hearth_requests_total", outcome=kind) for kind in kinds)
    return ends + total(series, "hearth_watchdog_ends_total")


def in_flight(server: Server) -> int:
    return sum(row["in_flight"] for row in server.health()["workers"])


def is_amid_everything(server: SleepingServer, talks: list[Talk]) -> bool:
    """Return whether both workers read, write, queue and store at once."""
    if not all(row["running"] == 2 and row["waiting"] for row in server.health()["workers"]):
        return False
    stores = all(row["disk"]["queue_bytes"] for row in server.caches())
    return stores and all(talk.text for talk in talks[:2])


def test_every_request_has_one_end_and_every_session_goes_on(server: SleepingServer) -> None:
    server.slow.touch()
    talks = [Talk(server, f"session {n}", opening(n, row)) for n, row in enumerate(WORDS)]
    upload, rest = half_sent(server)
    for count, talk in enumerate(talks, start=1):
        talk.start()
        until(lambda: in_flight(server) == count)  # noqa: B023 -- waited for at once
    for kind in SIGNALS:
        until(lambda: is_amid_everything(server, talks))
        server.sleep(kind)
        time.sleep(1.2)  # longer than between two looks at workers, leases and silences
    server.slow.unlink()
    upload.send(rest)
    for talk in talks:
        talk.join(WAIT_S_MAX)
    assert [(talk.error, len(talk.ends)) for talk in talks] == [("", 1)] * len(talks)
    assert bad_ends(server) == 0
    assert {end for talk in talks for end in talk.ends} <= {"length", "stop"}
    answer = upload.getresponse()
    assert (answer.status, bool(answer.read())) == (200, True)
    upload.close()
    for talk in talks:
        following = talk.following()
        following.run()
        assert following.error == "" and following.cached >= talk.prompt, talk.session
    assert [row["restarts"] for row in server.health()["workers"]] == [0, 0]
