"""Rounds of the bench: who takes turns, what is played again, and what a failure leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
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

MODEL_DIR = Path("/home/somebody/models/tiny")


def model(label: str = "tiny", kind: str = "text") -> BenchModel:
    return BenchModel(ModelFacts(label, kind, "qwen3", 1_000), MODEL_DIR)


def results_for(*servers: str) -> Results:
    results = Results("hearth bench", "a machine", "1", "c", "quick", 2, "now")
    results.servers |= {name: ServerFacts(name, "1", "run", False) for name in servers}
    return results


class Played:
    """Notes what happens, in order, in place of servers."""

    def __init__(self, *, fails: str = "") -> None:
        self.events: list[str] = []
        self.homes: list[Path] = []
        self._fails = fails
        self.error: Exception | None = None

    @contextlib.asynccontextmanager
    async def start(
        self, server: Server, directory: Path, home: Path, memory: Memory, memory_mb: int
    ) -> AsyncIterator[Any]:
        self.homes.append(home)
        self.events.append(f"start {server.name} {home.name} {memory}")
        if self._fails == server.name:
            raise self.error or ServerStartError(f"no {directory}/config.json in {home}")

        async def kill() -> None:
            self.events.append("kill")

        try:
            yield SimpleNamespace(kill=kill, is_metered=True)
        finally:
            self.events.append("end")

    def workload(self, name: str, start: Start = Start.FRESH, **more: Any) -> Workload:
        async def run(visit: Visit) -> Measured:
            self.events.append(f"{name} {visit.round}")
            visit.kept[name] = True
            return Measured({"read_tokens": float(len(visit.kept))})

        return Workload(name, f"It does {name}.", start, run, **more)


def course_of(
    workloads: list[Workload], servers: tuple[str, ...] = ("hearth",), rounds: int = 1
) -> Course:
    named = [Server(name) for name in servers]
    return Course([model()], named, workloads, SCALES["quick"], rounds)


def play(
    course: Course, played: Played, results: Results | None = None, start: Any = None
) -> Results:
    results = results or results_for(*(server.name for server in course.servers))
    with pytest.MonkeyPatch.context() as patcher, TemporaryDirectory() as directory:
        patcher.setattr(module, "started", start or played.start)
        patcher.setattr(module, "memory_mb", lambda *_: 7)
        asyncio.run(module.play(course, results, Path(directory, "a.json")))
        if results.cells:
            assert Results.load(Path(directory, "a.json")).cells == results.cells
    return results


def values_of(results: Results, server: str, workload: str) -> list[dict[str, float]]:
    """Return what each round measured, without the machine's load."""
    cell = results.cell("tiny", server, workload)
    return [
        {name: each for name in cell.values if name != "load" and (each := cell.values[name][at])}
        for at in range(len(cell.rounds))
    ]


def errors_of(results: Results, server: str, workload: str) -> list[str]:
    return [
        each for told in results.cell("tiny", server, workload).errors.values() for each in told
    ]


def test_a_visit_has_its_starts_in_order_and_one_home_but_the_cold_one() -> None:
    played = Played()
    workloads = [
        played.workload("cold", Start.COLD),
        played.workload("killed", Start.KILLED),
        played.workload("fresh"),
        played.workload("again", Start.RESTARTED),
    ]
    course = course_of(workloads)
    play(course, played)
    assert played.events == [
        *("start hearth home default", "fresh 0", "end"),
        *("start hearth home default", "again 0", "kill", "end"),
        *("start hearth home one session", "killed 0", "end"),
        *("start hearth cold none", "cold 0", "end"),
    ]
    assert len(set(played.homes)) == 2 and not any(home.exists() for home in played.homes)


def test_servers_take_turns_another_begins_each_round_and_every_other_one_goes_backwards() -> None:
    played = Played()
    play(course_of([played.workload("w")], ("hearth", "b", "c"), rounds=3), played)
    starts = [event.split()[1] for event in played.events if event.startswith("start")]
    assert starts == ["hearth", "b", "c", "b", "hearth", "c", "c", "hearth", "b"]


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_server_has_one_visit_in_each_round(servers: int, rounds: int) -> None:
    course = course_of([], tuple(f"s{number}" for number in range(servers)), rounds)
    visits = [(visit.server.name, visit.round) for visit in course.visits()]
    assert len(visits) == len(set(visits)) == servers * rounds
    assert [number for _, number in visits] == sorted(number for _, number in visits)


def test_a_visit_whose_samples_are_there_is_not_played_again() -> None:
    played = Played()
    course = course_of([played.workload("one"), played.workload("two")], rounds=2)
    results = results_for("hearth")
    for name, number in (("one", 0), ("two", 0), ("one", 1)):
        results.put(("tiny", "hearth", name), number, {"read_tokens": 99})
    play(course, played, results)
    assert [event for event in played.events if event[:3] in ("one", "two")] == ["one 1", "two 1"]
    assert values_of(results, "hearth", "one") == [{"read_tokens": 99}, {"read_tokens": 1}]


def test_a_server_that_does_not_start_has_rounds_that_say_so_without_paths() -> None:
    course = course_of([Played().workload("w")], ("hearth", "bad"))
    results = play(course, Played(fails="bad"))
    (told,) = errors_of(results, "bad", "w")
    assert told == "no {model}/config.json in {dir}/home"
    assert values_of(results, "bad", "w") == [{}] and errors_of(results, "hearth", "w") == []


def test_a_server_that_does_not_start_is_tried_once_in_a_visit() -> None:
    played = Played(fails="bad")
    workloads = [played.workload("w"), played.workload("again", Start.RESTARTED)]
    results = play(course_of(workloads, ("bad",), rounds=2), played)
    assert played.events == ["start bad home default"] * 2
    assert len(errors_of(results, "bad", "again")) == 2


def test_a_later_start_that_fails_leaves_the_others() -> None:
    played = Played()
    workloads = [
        played.workload("w"),
        played.workload("again", Start.RESTARTED),
        played.workload("cold", Start.COLD),
    ]

    @contextlib.asynccontextmanager
    async def start(*given: Any) -> AsyncIterator[Any]:
        if len(played.homes) == 1:
            played.homes.append(given[2])
            raise ServerStartError("not again")
        async with played.start(*given) as running:
            yield running

    results = play(course_of(workloads), played, start=start)
    assert errors_of(results, "hearth", "again") == ["not again"]
    assert values_of(results, "hearth", "w") and values_of(results, "hearth", "cold")


def test_a_server_that_hangs_is_not_asked_again_before_its_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WORKLOAD_S_MAX", 0.01)
    played = Played()

    async def hangs(visit: Visit) -> Measured:
        await asyncio.sleep(600)
        raise AssertionError("it was waited for")

    first, again = played.workload("v"), played.workload("again", Start.RESTARTED)
    hanging = Workload("hanging", "It hangs.", Start.FRESH, hangs)
    results = play(course_of([first, hanging, played.workload("w"), again]), played)
    for name in ("hanging", "w"):
        assert errors_of(results, "hearth", name) == ["hanging did not end in time"]
    assert errors_of(results, "hearth", "again") == [] and "w 0" not in played.events


def test_a_full_disk_ends_the_run_and_what_is_in_memory_stays_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(results: Results, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Results, "save", full)
    played, results = Played(), results_for("hearth")
    with pytest.raises(OSError, match="No space left"):
        play(course_of([played.workload("w"), played.workload("v")]), played, results)
    assert list(results.places()) == [("tiny", "hearth", "w")]


def test_a_workload_that_fails_does_not_end_the_run() -> None:
    played = Played()

    async def fails(visit: Visit) -> Measured:
        raise RuntimeError(f"it broke in {MODEL_DIR}/file.py")

    broken = Workload("broken", "It breaks.", Start.FRESH, fails)
    results = play(course_of([broken, played.workload("w")]), played)
    assert errors_of(results, "hearth", "broken") == ["RuntimeError: it broke in {model}/file.py"]
    assert values_of(results, "hearth", "w") == [{"read_tokens": 1}]


def test_an_interrupted_run_keeps_what_is_taken_and_ends_the_server() -> None:
    played = Played()

    async def interrupted(visit: Visit) -> Measured:
        raise asyncio.CancelledError

    last = Workload("last", "It is interrupted.", Start.FRESH, interrupted)
    course, results = course_of([played.workload("w"), last]), results_for("hearth")
    with pytest.raises(asyncio.CancelledError):
        play(course, played, results)
    assert list(results.places()) == [("tiny", "hearth", "w")]
    assert len(course.missing(results)) == 1 and played.events[-1] == "end"


def test_a_server_by_url_is_started_once_and_never_killed() -> None:
    played = Played()
    workloads = [
        played.workload("fresh"),
        played.workload("again", Start.RESTARTED),
        played.workload("killed", Start.KILLED),
        played.workload("cold", Start.COLD),
    ]
    course = Course(
        [model()], [Server("mine", url="http://127.0.0.1:1")], workloads, SCALES["quick"], 1
    )
    results = play(course, played, results_for("mine"))
    assert played.events == ["start mine home default", "fresh 0", "again 0", "end"]
    assert not course.missing(results)


@pytest.mark.parametrize(("kind", "count"), [("text", 0), ("vision", 1)])
def test_images_are_for_models_that_see(kind: str, count: int) -> None:
    sees = Played().workload("images", needs_images=True)
    course = Course([model(kind=kind)], [Server("hearth")], [sees], SCALES["quick"], 1)
    assert len(course.played(course.visits()[0])) == count


def test_the_cold_start_is_in_the_first_round_alone() -> None:
    played = Played()
    cold = [played.workload("cold", Start.COLD), played.workload("w")]
    play(course_of(cold, rounds=3), played)
    assert [event for event in played.events if event.startswith("cold")] == ["cold 0"]
