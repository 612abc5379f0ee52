"""A workload is charged with all that a server does until it rests."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench import measuring as module
from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.measuring import REST_S, REST_S_MAX, Activity, Taken, measuring
from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Meter, Server
from hearth.commands.bench.servers.started_server import StartedServer
from hearth.commands.bench.workload import SCALES, Visit
from hearth.commands.replay.player import Target


class MadeServer(StartedServer):
    """A server whose meter a test moves: by hand, or by itself at each of `idle_looks`."""

    def __init__(self, pids: list[int], is_metered: bool = True) -> None:
        super().__init__(Target("http://127.0.0.1:1", "", "m"))
        self.is_metered = is_metered
        self.read, self.forwards = 1_000.0, 10.0  # of earlier workloads
        self.idle_looks = 0
        self._pids = pids

    def meter(self) -> Meter | None:
        if self.idle_looks:
            self.idle_looks -= 1
            self.read += 1
        return Meter(self.read, self.forwards) if self.is_metered else None

    def pids(self) -> list[int]:
        return self._pids


def measured(server: MadeServer, work: Callable[[], None]) -> Taken:
    facts = ModelFacts("m", "text", "qwen3", 1)
    visit = Visit(Server("made"), server, facts, SCALES["quick"], 0)

    async def run() -> Taken:
        async with measuring(visit) as taken:
            with pytest.raises(AssertionError, match="not ended"):
                taken.values()
            work()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return taken

    return asyncio.run(run())


def test_all_that_is_read_until_the_server_rests_is_the_workloads() -> None:
    server = MadeServer([os.getpid()])

    def work() -> None:
        server.read += 100
        server.forwards += 3
        server.idle_looks = 4  # it reads on when the block has ended, at the next looks

    taken = measured(server, work)
    values = taken.values()
    assert taken.forwards == 3
    assert values["read_tokens"] == 104
    assert 3 <= values["idle_tokens"] <= 4  # the look at the end may be one of them
    assert values["cpu_s"] >= 0 and values["written_bytes"] >= 0
    assert values["memory_bytes"] > 1e6
    assert set(values) <= set(MEASURES)


@pytest.mark.process
def test_what_its_processes_take_is_the_servers_those_that_ended_too() -> None:
    burn = "import time; until = time.process_time() + 0.4\nwhile time.process_time() < until: pass"

    def work() -> None:
        subprocess.run([sys.executable, "-c", burn], check=True)

    values = measured(MadeServer([os.getpid(), 2**22 + 1]), work).values()
    assert 0.3 <= values["cpu_s"] <= 10


def test_of_a_server_by_url_only_the_time_is_told() -> None:
    taken = measured(MadeServer([], is_metered=False), lambda: None)
    assert set(taken.values()) == {"wall_s"}
    assert taken.forwards is None


def test_a_server_that_never_rests_is_left_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAIT_S_MAX", 0.2)
    server = MadeServer([])
    server.idle_looks = 1_000_000
    taken = measured(server, lambda: None)
    assert taken.values()["idle_tokens"] > 0


def test_an_error_of_the_workload_is_told_and_nothing_goes_on() -> None:
    def fail() -> None:
        raise LookupError("the workload failed")

    with pytest.raises(LookupError, match="the workload failed"):
        measured(MadeServer([os.getpid()]), fail)


# ---------------------------------------------------------------- rest


def activity(*moves: float) -> Activity:
    made = Activity(Meter(0, 0))
    for number, at in enumerate(moves, start=1):
        made.look(at, Meter(number, number))
    return made


def test_a_server_that_read_nothing_rests_soon() -> None:
    assert not activity().is_at_rest(now=7.0 + REST_S / 2, ended=7.0)
    assert activity().is_at_rest(now=7.0 + REST_S, ended=7.0)


def test_a_server_whose_chunks_take_seconds_rests_later() -> None:
    slow = activity(1.0, 5.0, 9.0)
    assert not slow.is_at_rest(now=14.5, ended=9.1)
    slow.look(14.8, Meter(99, 99))
    assert not slow.is_at_rest(now=20.0, ended=9.1)
    assert slow.is_at_rest(now=14.8 + 1.5 * 5.9, ended=9.1)


def test_a_wait_of_the_workload_itself_is_no_chunk_of_the_server() -> None:
    waited = activity(1.0, 1.5)
    waited.forget()  # it slept for five seconds
    waited.look(6.5, Meter(9, 9))
    assert waited.is_at_rest(now=6.5 + 1.5 * 0.5, ended=6.6)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.floats(0, 100), st.floats(0, 100))
def test_rest_begins_once_and_within_bounds(moves: list[float], ended: float, more: float) -> None:
    made = activity(*sorted(moves))
    last = max(moves)
    assert not made.is_at_rest(last + REST_S * 0.99, ended)
    surely = max(last + REST_S_MAX, ended + REST_S) + 1e-6
    assert made.is_at_rest(surely + more, ended)
