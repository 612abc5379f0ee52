"""Servers are compared in rounds, in which none has the better place for long."""

from pathlib import Path

from hypothesis import given, strategies as st

from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.visit_rounds import Course
from hearth.commands.bench.server import Server
from hearth.commands.bench.workload import SCALES


def visits(*servers: str, rounds: int) -> list[tuple[str, int]]:
    model = BenchModel(ModelFacts("tiny", "text", "qwen3", 1_000), Path("/home/some/tiny"))
    course = Course([model], [Server(name) for name in servers], [], SCALES["quick"], rounds)
    return [(visit.server.name, visit.round) for visit in course.visits()]


def test_another_server_begins_each_round_and_every_other_round_goes_backwards() -> None:
    names = [name for name, _ in visits("hearth", "b", "c", rounds=3)]
    assert names == ["hearth", "b", "c", "b", "hearth", "c", "c", "hearth", "b"]


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_server_has_one_visit_in_each_round(servers: int, rounds: int) -> None:
    found = visits(*(f"s{number}" for number in range(servers)), rounds=rounds)
    assert len(found) == len(set(found)) == servers * rounds
    assert [number for _, number in found] == sorted(number for _, number in found)
