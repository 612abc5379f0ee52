"""Rounds of the bench: who takes turns, what is played again, and what a failure leaves."""

import asyncio
import contextlib
import getpass
import platform
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.results import ModelFacts, Results, Sample, ServerFacts
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.visit_rounds import Course, Rounds, SaveError
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.started_server import ServerStartError
from hearth.commands.bench.workload import SCALES, Measured, Start, Visit, Workload

MODEL_DIR = Path("/home/somebody/models/tiny")


@pytest.fixture(autouse=True)
def anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no word of these errors be the name of whoever runs the tests, or of the machine."""
    monkeypatch.setattr(platform, "node", lambda: "anns-macbook.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/ann"))


def model(label: str = "tiny", kind: str = "dense") -> BenchModel:
    return BenchModel(ModelFacts(label, kind, "qwen3", 1_000), MODEL_DIR, 64)


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

        yield SimpleNamespace(kill=kill, is_metered=True)
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


def play(course: Course, played: Played, results: Results | None = None) -> Results:
    results = results or results_for(*(server.name for server in course.servers))
    asyncio.run(Rounds(course, results, lambda: None, lambda *_: None, played.start).play())
    return results


def test_a_visit_has_its_starts_in_order_and_one_home_but_the_cold_one() -> None:
    played = Played()
    workloads = [
        played.workload("cold", Start.COLD),
        played.workload("killed", Start.KILLED),
        played.workload("fresh"),
        played.workload("again", Start.RESTARTED),
    ]
    course = course_of(workloads)
    memory_of_one = pytest.MonkeyPatch()
    memory_of_one.setattr("hearth.commands.bench.rounds.visit_rounds.memory_mb", lambda *_: 7)
    with memory_of_one.context():
        play(course, played)
    memory_of_one.undo()
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
    results.add(
        Sample("tiny", "hearth", name, number, {"read_tokens": 99})
        for name, number in (("one", 0), ("two", 0), ("one", 1))
    )
    play(course, played, results)
    assert [event for event in played.events if event[:3] in ("one", "two")] == ["one 1", "two 1"]
    told = [sample.values["read_tokens"] for sample in results.of("tiny", "hearth", "one")]
    assert told == [99, 1]


def test_a_server_that_does_not_start_has_samples_that_say_so_without_paths() -> None:
    played = Played(fails="bad")
    course = course_of([played.workload("w")], ("hearth", "bad"))
    results = play(course, played)
    (sample,) = results.of("tiny", "bad", "w")
    assert sample.values == {} and sample.errors[0].endswith("no {model}/config.json in {dir}/home")
    assert results.of("tiny", "hearth", "w")[0].errors == ()


@pytest.mark.parametrize("error", [TypeError("x"), KeyError("data"), RecursionError("deep")])
def test_a_server_that_answers_its_start_with_garbage_does_not_end_the_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(fails="bad")
    monkeypatch.setattr(played, "error", error)
    results = play(course_of([played.workload("w")], ("bad", "hearth")), played)
    assert type(error).__name__ in results.of("tiny", "bad", "w")[0].errors[0]
    assert results.of("tiny", "hearth", "w")[0].values


def test_a_server_that_does_not_start_is_tried_once_in_a_visit() -> None:
    played = Played(fails="bad")
    workloads = [played.workload("w"), played.workload("again", Start.RESTARTED)]
    results = play(course_of(workloads, ("bad",), rounds=2), played)
    assert played.events == ["start bad home default"] * 2
    told = [each.errors[0] for each in results.of("tiny", "bad", "again")]
    assert told == ["its first start failed, and it was not started again"] * 2


def test_what_was_measured_before_a_server_failed_to_end_is_kept() -> None:
    played = Played()
    results = results_for("hearth")
    course = course_of([played.workload("w"), played.workload("v")])

    @contextlib.asynccontextmanager
    async def start(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(is_metered=True)
        raise OSError("it cannot be killed")

    asyncio.run(Rounds(course, results, lambda: None, lambda *_: None, start).play())
    assert [(each.workload, each.errors) for each in results.samples] == [("w", ()), ("v", ())]


def test_a_server_that_hangs_is_not_asked_again_before_its_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hearth.commands.bench.rounds.visit_rounds.WORKLOAD_S_MAX", 0.01)
    played = Played()

    async def hangs(visit: Visit) -> Measured:
        await asyncio.sleep(600)
        raise AssertionError("it was waited for")

    hanging = Workload("hanging", "It hangs.", Start.FRESH, hangs)
    again = played.workload("again", Start.RESTARTED)
    results = play(course_of([hanging, played.workload("w"), again]), played)
    told = {each.workload: each.errors for each in results.samples}
    assert told["hanging"] == ("TimeoutError",) and "never ended" in told["w"][0]
    assert told["again"] == () and "w 0" not in played.events


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 10**400])
def test_an_impossible_value_is_an_error_and_not_in_the_file(value: float) -> None:
    async def wrong(visit: Visit) -> Measured:
        return Measured({"cpu_s": value, "wall_s": 1.0})

    course = course_of([Workload("wrong", "It is wrong.", Start.FRESH, wrong)])
    (sample,) = play(course, Played()).samples
    assert sample.values == {"wall_s": 1.0} and sample.errors == ("no possible value: cpu_s",)


def test_a_full_disk_ends_the_run_and_what_is_in_memory_stays_true() -> None:
    played = Played()

    def full() -> None:
        raise OSError(28, "No space left on device")

    course, results = course_of([played.workload("w"), played.workload("v")]), results_for("hearth")
    with pytest.raises(SaveError, match="No space left"):
        asyncio.run(Rounds(course, results, full, lambda *_: None, played.start).play())
    assert [(each.workload, each.errors) for each in results.samples] == [("w", ())]


def test_a_workload_that_fails_does_not_end_the_run() -> None:
    played = Played()

    async def fails(visit: Visit) -> Measured:
        raise RuntimeError("it broke in /home/somebody/secret/file.py")

    broken = Workload("broken", "It breaks.", Start.FRESH, fails)
    results = play(course_of([broken, played.workload("w")]), played)
    assert results.of("tiny", "hearth", "broken")[0].errors == (
        "RuntimeError: it broke in file.py",
    )
    assert results.of("tiny", "hearth", "w")[0].values == {"read_tokens": 1}


def test_an_interrupted_run_keeps_what_is_taken_and_ends_the_server() -> None:
    played = Played()
    saved: list[int] = []

    async def interrupted(visit: Visit) -> Measured:
        raise asyncio.CancelledError

    last = Workload("last", "It is interrupted.", Start.FRESH, interrupted)
    course = course_of([played.workload("w"), last])
    results = results_for("hearth")
    rounds = Rounds(
        course, results, lambda: saved.append(len(results.samples)), lambda *_: None, played.start
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(rounds.play())
    assert saved == [1] and [sample.workload for sample in results.samples] == ["w"]
    assert [each.name for each in course.missing(course.visits()[0], results)] == ["last"]


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
    assert not course.missing(course.visits()[0], results)


@pytest.mark.parametrize(("kind", "count"), [("dense", 0), ("vision", 1)])
def test_images_are_for_models_that_see(kind: str, count: int) -> None:
    sees = Played().workload("images", needs_images=True)
    course = Course([model(kind=kind)], [Server("hearth")], [sees], SCALES["quick"], 1)
    assert len(course.played(course.visits()[0])) == count


def test_the_cold_start_is_in_the_first_round_alone() -> None:
    played = Played()
    cold = [played.workload("cold", Start.COLD), played.workload("w")]
    play(course_of(cold, rounds=3), played)
    assert [event for event in played.events if event.startswith("cold")] == ["cold 0"]
