"""Rounds of the bench: who takes turns, what is played again, and what a failure leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.results import ModelFacts, Results, ServerFacts
from hearth.commands.bench.rounds import visit_rounds as module
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.visit_rounds import Course
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.started_server import ServerStartError
from hearth.commands.bench.workload import SCALES, Measured, Start, Visit, Workload


class Played:
    """Notes what happens, in order, in place of servers. One called "bad" does not start."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / "a.json"
        self.events: list[str] = []
        self.results = Results("hearth bench", "a machine", "1", "c", "quick", 2, "now")
        monkeypatch.setattr(module, "started", self._start)
        monkeypatch.setattr(module, "memory_mb", lambda *_: 7)

    @contextlib.asynccontextmanager
    async def _start(
        self, server: Server, directory: Path, home: Path, memory: Memory, memory_mb: int
    ) -> AsyncIterator[Any]:
        self.events.append(f"start {server.name} {home.name} {memory}")
        if server.name == "bad":
            raise ServerStartError(f"no {directory}/config.json in {home}")

        async def kill() -> None:
            self.events.append("kill")

        yield SimpleNamespace(kill=kill, is_metered=True)
        self.events.append("end")

    def workload(self, name: str, start: Start = Start.FRESH) -> Workload:
        async def run(visit: Visit) -> Measured:
            self.events.append(f"{name} {visit.round}")
            return Measured({"read_tokens": 1.0})

        return Workload(name, f"It does {name}.", start, run)

    def play(self, course: Course) -> None:
        facts = {each.name: ServerFacts(each.name, "1", "run", False) for each in course.servers}
        self.results.servers |= facts
        asyncio.run(module.play(course, self.results, self.file))
        assert Results.load(self.file).cells == self.results.cells


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def course_of(workloads: list[Workload], *servers: str, rounds: int = 1) -> Course:
    model = BenchModel(ModelFacts("tiny", "text", "qwen3", 1_000), Path("/home/some/tiny"))
    return Course([model], [Server(name) for name in servers], workloads, SCALES["quick"], rounds)


def test_a_visit_has_its_starts_in_order_and_one_home_but_the_cold_one(played: Played) -> None:
    starts = {"cold": Start.COLD, "killed": Start.KILLED, "fresh": Start.FRESH}
    starts["again"] = Start.RESTARTED
    played.play(course_of([played.workload(*each) for each in starts.items()], "hearth"))
    assert played.events == [
        *("start hearth home default", "fresh 0", "end"),
        *("start hearth home default", "again 0", "kill", "end"),
        *("start hearth home one session", "killed 0", "end"),
        *("start hearth cold none", "cold 0", "end"),
    ]


def test_servers_take_turns_another_begins_each_round_and_every_other_one_goes_backwards(
    played: Played,
) -> None:
    played.play(course_of([played.workload("w")], "hearth", "b", "c", rounds=3))
    starts = [event.split()[1] for event in played.events if event.startswith("start")]
    assert starts == ["hearth", "b", "c", "b", "hearth", "c", "c", "hearth", "b"]


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_server_has_one_visit_in_each_round(servers: int, rounds: int) -> None:
    course = course_of([], *(f"s{number}" for number in range(servers)), rounds=rounds)
    visits = [(visit.server.name, visit.round) for visit in course.visits()]
    assert len(visits) == len(set(visits)) == servers * rounds
    assert [number for _, number in visits] == sorted(number for _, number in visits)


def test_a_server_that_does_not_start_has_rounds_that_say_so_without_paths(
    played: Played,
) -> None:
    played.play(course_of([played.workload("w")], "hearth", "bad"))
    told = played.results.cell("tiny", "bad", "w")
    assert told.errors == {"0": ["no {model}/config.json in {dir}/home"]}
    assert "read_tokens" not in told.values
    assert played.results.cell("tiny", "hearth", "w").errors == {}
