"""The plan of a bench says what it takes before it begins, and progress what is left."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.results import ModelFacts, Results, Sample
from hearth.commands.bench.rounds.calibration import Rates
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.plan import ChosenServer, Plan, minutes, visit_seconds
from hearth.commands.bench.rounds.progress import Progress
from hearth.commands.bench.rounds.visit_rounds import Course
from hearth.commands.bench.server import Server
from hearth.commands.bench.workload import SCALES, Measured, Start, Visit, Workload

MODEL = BenchModel(ModelFacts("Qwen-7B", "dense", "qwen3", 15_000_000_000, 4), Path("/m"), 100_000)
SERVERS = [
    ChosenServer(Server("hearth"), "hearth 1"),
    ChosenServer(Server("mine", url="http://127.0.0.1:8000"), "not known"),
    ChosenServer(Server("packaged", package="packaged==2"), "packaged 2", 1_200_000_000),
]
RATES = {"Qwen-7B": Rates(start_s=10.0, read_s=0.004, answer_s=0.1)}


async def nothing(visit: Visit) -> Measured:
    return Measured({})


def workload(name: str, start: Start = Start.FRESH, tokens: int = 10_000, **more: Any) -> Workload:
    about = f"It does {name}."
    return Workload(name, about, start, nothing, read_tokens=lambda scale: tokens, **more)


def plan_of(rounds: int = 2, **more: Any) -> Plan:
    workloads = [workload("one"), workload("two", Start.RESTARTED)]
    workloads.append(workload("images", needs_images=True))
    servers = [each.server for each in SERVERS]
    course = Course([MODEL], servers, workloads, SCALES["full"], rounds)
    results = Results("hearth bench", "a machine", "1", "", "full", rounds, "now")
    return Plan(course, SERVERS, results, Path("a.json"), Path("a.html"), **more)


def test_the_plan_names_all_that_it_takes() -> None:
    text = "\n".join(plan_of(rates=RATES, warnings=["It is busy."]).lines())
    for told in (
        "hearth             hearth 1\n",
        "mine               not known, runs at http://127.0.0.1:8000, is not restarted",
        "packaged 2, is installed first into ~/.cache/hearth-peers, about 1.2 GB",
        "15.0 GB, dense, qwen3, 4 bits",
        "  one                It does one.",
        "Rounds: 2, servers in turns; 6 visits",
        "Time: about 20 minutes",
        "Memory: one server at a time: 15.0 GB of weights",
        "1.2 GB stay for what is installed",
        "Writes: a.json and a.html",
        "Note: It is busy.",
    ):
        assert told in text
    assert "images" not in text, "no model sees them"


def test_without_a_rate_no_time_is_told() -> None:
    assert plan_of().seconds() is None
    assert "Time: not estimated" in plan_of().lines()


def test_what_is_in_the_file_costs_nothing() -> None:
    plan = plan_of(rates=RATES)
    whole = plan.seconds()
    plan.results.add(Sample("Qwen-7B", "hearth", name, 0, {}) for name in ("one", "two"))
    left = plan.seconds()
    assert whole and left
    visit = plan.course.visits()[0]
    assert left == pytest.approx(whole - visit_seconds(plan.course, visit, RATES["Qwen-7B"]))
    assert any("5 visits (1 are in the file already)" in line for line in plan.lines())


def test_a_large_model_takes_hours_by_how_fast_it_reads() -> None:
    slow = {"Qwen-7B": Rates(10.0, 0.04, 1.0)}
    fast, much = plan_of(rates=RATES).seconds(), plan_of(rates=slow).seconds()
    assert fast and much and 5 < much / fast < 10


@given(st.floats(0, 1e6))
def test_a_time_is_told_by_one_number_and_its_unit(seconds: float) -> None:
    number, unit = minutes(seconds).split()
    assert float(number) > 0 and unit in ("s", "minutes", "hours")


def test_progress_counts_workloads_and_learns_from_what_they_took() -> None:
    plan, said, now = plan_of(rates=RATES), [], [0.0]
    progress = Progress(plan.course, plan.results, RATES, said.append, lambda: now[0])
    for visit in plan.course.visits():
        for each in plan.course.played(visit):
            progress.tell(visit, each)
            now[0] += 600.0
    assert len(said) == 12
    assert said[0].startswith("[1/12] Qwen-7B, round 1 of 2, hearth: one (about ")
    assert said[-1].startswith("[12/12] Qwen-7B, round 2 of 2, packaged: two")
    assert "hours left" not in said[0] and "hours left" in said[3], "it took longer than planned"


def test_progress_without_rates_says_nothing_of_time_at_first() -> None:
    plan, said = plan_of(), []
    visit = plan.course.visits()[0]
    Progress(plan.course, plan.results, {}, said.append).tell(visit, plan.course.played(visit)[0])
    assert said == ["[1/12] Qwen-7B, round 1 of 2, hearth: one"]


@pytest.mark.parametrize(("platform", "count"), [("darwin", 1), ("linux", 0)])
def test_what_runs_as_root_is_said_before_it_does(
    platform: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.commands.bench.rounds.plan.sys.platform", platform)
    assert sum("powermetrics, as root" in line for line in plan_of().lines()) == count
