"""A machine that sleeps for eight hours amid everything: each request has one end, and goes on."""

import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clients.scraped_metrics import families_of, series_of, total
from tests.helpers.servers.server import WAIT_S_MAX, Server, until
from tests.helpers.servers.sleeping_machine import SIGNALS, THIS

pytestmark = pytest.mark.night  # clocks are shifted; the laws of each are unit tests
WORDS = (20, 20, 400, 400, 40, 40)  # what decodes, what is prefilled, what waits for a slot
BAD_ENDS = ("cancelled", "failed", "refused_4xx", "refused_5xx")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of two workers, slow while the file SLOW_WHILE is there."""
    settings = {"WORKERS": "2", "DEFAULT_THINKING": "false", "LIVE_SLOTS_MAX": "2"}
    made = Server(**settings, PREFILL_CHUNK="64", SLOW_WHILE=str(tmp_path / "slow"))
    made.start("-m", THIS)
    with made.ready() as running:
        until(lambda: [row["state"] for row in made.health()["workers"]] == ["ready", "ready"])
        yield running


class Talk(threading.Thread):
    """One session's request, a long prompt and a streamed answer."""

    def __init__(self, server: Server, number: int, history: list[Any], tokens: int = 40) -> None:
        super().__init__()
        self.server, self.number, self.history, self.tokens = server, number, history, tokens
        self.text = self.error = ""
        self.ends: list[str] = []
        self.usage: Any = None

    def run(self) -> None:
        try:
            with self.server.openai() as client:
                for event in client.chat.completions.create(
                    model="local",
                    messages=self.history,
                    stream=True,
                    stream_options={"include_usage": True},
                    max_tokens=self.tokens,
                    extra_headers={"x-session-id": f"session {self.number}"},
                ):
                    self.usage = event.usage or self.usage
                    for choice in event.choices:
                        self.text += choice.delta.content or ""
                        self.ends += [choice.finish_reason] if choice.finish_reason else []
        except Exception as error:  # told by the assertion on it
            self.error = repr(error)

    def cached_next(self) -> int:
        """Return how much of the session's next request was kept."""
        said = {"role": "assistant", "content": self.text}
        asked = [*self.history, said, {"role": "user", "content": "Go on."}]
        following = Talk(self.server, self.number, asked, tokens=2)
        following.run()
        assert following.error == ""
        return int(following.usage.prompt_tokens_details.cached_tokens)


def asleep(server: Server, kind: str) -> None:
    """Put all processes to sleep; the proxy is the last to wake."""
    for worker in server.health()["workers"]:
        os.kill(worker["pid"], SIGNALS[kind])
    time.sleep(0.5)
    assert server.process is not None
    os.kill(server.process.pid, SIGNALS[kind])
    time.sleep(1.2)  # longer than between two looks at workers, leases and silences


def bad_ends(server: Server) -> float:
    """Return how many requests were refused, broke off, were cancelled or had their time."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S_MAX) as answer:
        series = series_of(families_of(answer.read().decode()).values())
    ends = sum(total(series, "hearth_requests_total", outcome=kind) for kind in BAD_ENDS)
    return ends + total(series, "hearth_watchdog_ends_total")


def is_amid_everything(server: Server, talks: list[Talk]) -> bool:
    """Return whether both workers read, write, queue and store at once."""
    if not all(row["running"] == 2 and row["waiting"] for row in server.health()["workers"]):
        return False
    stores = all(row["disk"]["queue_bytes"] for row in server.get("/v1/cache")["workers"])
    return stores and all(talk.text for talk in talks[:2])


def test_every_request_has_one_end_and_every_session_goes_on(server: Server) -> None:
    slow = Path(server.environment["SLOW_WHILE"])
    slow.touch()
    words = [" ".join(f"{n}-{word}" for word in range(count)) for n, count in enumerate(WORDS)]
    talks = [Talk(server, n, [{"role": "user", "content": text}]) for n, text in enumerate(words)]
    for count, talk in enumerate(talks, start=1):
        talk.start()
        until(lambda: sum(row["in_flight"] for row in server.health()["workers"]) == count)  # noqa: B023
    for kind in SIGNALS:
        until(lambda: is_amid_everything(server, talks))
        asleep(server, kind)
    slow.unlink()
    for talk in talks:
        talk.join(WAIT_S_MAX)
    assert [(talk.error, len(talk.ends)) for talk in talks] == [("", 1)] * len(talks)
    assert {end for talk in talks for end in talk.ends} <= {"length", "stop"}
    assert bad_ends(server) == 0
    assert all(talk.cached_next() >= talk.usage.prompt_tokens for talk in talks)
    assert [row["restarts"] for row in server.health()["workers"]] == [0, 0]
