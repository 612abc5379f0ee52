"""A workload is charged with all that a server does until it rests."""

import os

from hypothesis import given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.measuring import REST_S, REST_S_MAX, Activity, measuring
from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Meter, Server
from hearth.commands.bench.servers.started_server import StartedServer
from hearth.commands.bench.workload import SCALES, Visit
from hearth.commands.replay.player import Target


class ReadingServer(StartedServer):
    """A server that reads on by itself at each of some looks at its meter."""

    def __init__(self) -> None:
        super().__init__(Target("http://127.0.0.1:1", "", "m"))
        self.is_metered = True
        self.read, self.idle_looks = 1_000.0, 0  # what earlier workloads had read

    def meter(self) -> Meter:
        self.read += self.idle_looks > 0
        self.idle_looks -= 1
        return Meter(self.read, 10.0)

    def pids(self) -> list[int]:
        return [os.getpid()]


async def test_all_that_is_read_until_the_server_rests_is_the_workloads() -> None:
    server = ReadingServer()
    visit = Visit(Server("made"), server, ModelFacts("m", "text", "qwen3", 1), SCALES["quick"], 0)

    async with measuring(visit) as taken:
        server.read += 100
        server.idle_looks = 4  # it reads on when the block has ended, at the next looks
    values = taken.values()
    assert values["read_tokens"] == 104
    assert 3 <= values["idle_tokens"] <= 4  # the look at the end may be one of them
    assert values["cpu_s"] >= 0 and values["written_bytes"] >= 0
    assert values["memory_bytes"] > 1e6
    assert set(values) <= set(MEASURES)


# ---------------------------------------------------------------- rest


def activity(*moves: float) -> Activity:
    made = Activity(Meter(0, 0))
    for number, at in enumerate(moves, start=1):
        made.look(at, Meter(number, number))
    return made


def test_a_server_whose_chunks_take_seconds_rests_later() -> None:
    slow = activity(1.0, 5.0, 9.0)
    assert not slow.is_at_rest(now=14.5, ended=9.1)
    slow.look(14.8, Meter(99, 99))
    assert not slow.is_at_rest(now=20.0, ended=9.1)
    assert slow.is_at_rest(now=14.8 + 1.5 * 5.9, ended=9.1)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.floats(0, 100), st.floats(0, 100))
def test_rest_begins_once_and_within_bounds(moves: list[float], ended: float, more: float) -> None:
    made = activity(*sorted(moves))
    last = max(moves)
    assert not made.is_at_rest(last + REST_S * 0.99, ended)
    surely = max(last + REST_S_MAX, ended + REST_S) + 1e-6
    assert made.is_at_rest(surely + more, ended)
