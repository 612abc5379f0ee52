"""An agent's hour, added up by hand beside what the page adds up; and the lines behind."""

from dataclasses import replace

import pytest

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.page.agent_hour import CPU, READ, WAIT, agent_hour, hour_parts
from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.page.page_lines import PageLines, Standing
from hearth.commands.bench.page.story import story
from hearth.commands.bench.results import HEARTH, Results, Sample
from tests.helpers.bench.made_results import made_results

MODEL = "qwen3"


def sample(server: str, workload: str, number: int, **values: float) -> Sample:
    return Sample(MODEL, server, workload, number, values)


def results(*samples: Sample, rounds: int = 1) -> Results:
    made = made_results(models=(MODEL,), servers=(HEARTH, "mlx_lm"), rounds=rounds)
    made.samples = list(samples)
    return made


def test_an_hour_is_forty_turns_and_two_fan_outs() -> None:
    lines = PageLines(
        results(
            sample(HEARTH, "linear", 0, read_tokens=1_000, requests=10, ttft_p50_s=0.5, cpu_s=3,
                   ideal_tokens=900),
            sample(HEARTH, "sub-agents", 0, read_tokens=300, requests=6, ttft_p50_s=0.2, cpu_s=1,
                   ideal_tokens=250),
        )
    )  # fmt: skip
    hour = agent_hour(lines, MODEL)
    (cost,) = hour.costs
    assert [part.workload for part in hour.parts] == ["linear", "sub-agents"]
    assert cost.lines[READ.name].median == 4 * 1_000 + 2 * 300
    assert cost.lines[WAIT.name].median == pytest.approx(4 * 10 * 0.5 + 2 * 6 * 0.2)
    assert cost.lines[CPU.name].median == pytest.approx(4 * 3 + 2 * 1)
    assert hour.ideal == 4 * 900 + 2 * 250


def test_each_round_is_added_up_by_itself() -> None:
    rows = [
        sample(HEARTH, name, at, read_tokens=value, requests=40)
        for name, values in (("linear", (10, 30, 20)), ("restart", (5, 1, 3)))
        for at, value in enumerate(values)
    ]
    lines = PageLines(results(*rows, rounds=3))
    (cost,) = agent_hour(lines, MODEL).costs
    line = cost.lines[READ.name]
    assert line.values == pytest.approx((10 + 5 / 40, 30 + 1 / 40, 20 + 3 / 40))
    assert (line.low, line.high) == (min(line.values), max(line.values))
    assert WAIT.name not in cost.lines, "no sample tells it"


def test_a_round_that_lacks_a_part_is_left_out_and_a_missing_part_is_told() -> None:
    lines = PageLines(
        results(
            sample(HEARTH, "linear", 0, read_tokens=10, requests=1),
            sample(HEARTH, "linear", 1, read_tokens=20, requests=1),
            sample(HEARTH, "restart", 1, read_tokens=1, requests=1),
            sample("mlx_lm", "linear", 1, read_tokens=20, requests=1),
        )
    )
    own, other = agent_hour(lines, MODEL).costs
    assert own.lines[READ.name].values == (40 * 20 + 1,)
    assert other.missing == ("restart",)
    assert other.lines == {}


def test_a_server_that_does_not_start_is_not_left_out_of_the_hour_in_silence() -> None:
    lines = PageLines(
        results(
            sample(HEARTH, "linear", 0, read_tokens=10, requests=1),
            Sample(MODEL, "mlx_lm", "linear", 0, {}, (), ("it has ended",)),
        )
    )
    _, other = agent_hour(lines, MODEL).costs
    assert (other.missing, other.lines, other.read) == (("linear",), {}, {})
    assert "it answered nothing with this model" in str(story(lines, Causes()))


def test_an_hour_with_failures_says_how_many() -> None:
    lines = PageLines(results(sample(HEARTH, "linear", 0, read_tokens=1, requests=1, failed=3)))
    (cost,) = agent_hour(lines, MODEL).costs
    assert cost.failed == 3
    assert hour_parts(PageLines(results())) == ()


def test_tokens_of_a_server_that_nobody_can_meter_are_those_that_it_claims() -> None:
    made = results(sample("mlx_lm", "linear", 0, claimed_tokens=7, requests=40))
    made.servers["mlx_lm"] = replace(made.servers["mlx_lm"], is_metered=False)
    (cost,) = agent_hour(PageLines(made), MODEL).costs
    assert cost.lines[READ.name].median == 7
    assert cost.lines[READ.name].is_claimed


def test_each_part_of_the_hour_is_told_and_what_is_left_without_cancelled_prompts() -> None:
    rows = [
        sample(server, workload, at, read_tokens=read + at, requests=requests)
        for server in (HEARTH, "mlx_lm")
        for workload, read, requests in (("linear", 100, 10), ("cancel-0s", 30, 3))
        for at in range(3)
        if (server, workload) != ("mlx_lm", "linear")
    ]
    own, other = agent_hour(PageLines(results(*rows, rounds=3)), MODEL).costs
    assert own.read == {"linear": 40 * 101 / 10, "cancel-0s": pytest.approx(2 * 31 / 3)}
    assert own.read_uncancelled == own.read["linear"]
    assert other.read_uncancelled is None, "linear is missing"


def test_what_repeats_another_line_is_compared_once() -> None:
    rows = [
        sample(server, workload, at, read_tokens=read, ideal_tokens=100, prompt_tokens=200,
               ttft_p50_s=wait, ttft_p95_s=wait * late)
        for server, read, wait in ((HEARTH, 200, 2.0), ("mlx_lm", 100, 1.0))
        for workload, late in (("linear", 2.0), ("kill", 1.0))
        for at in range(5)
    ]  # fmt: skip
    lines = PageLines(results(*rows, rounds=5))
    behind = sorted((each.workload, each.measure.name) for each in lines.behind)
    waits = [("kill", "ttft_p50_s"), ("linear", "ttft_p50_s"), ("linear", "ttft_p95_s")]
    assert behind == sorted([("kill", "read_tokens"), ("linear", "read_tokens"), *waits])
    assert lines.by_chance() == pytest.approx(len(behind) * 8 / 252)
    # The tables have them all the same.
    over = MEASURES["read_over_ideal"]
    assert lines.standing(MODEL, "mlx_lm", "kill", over) is Standing.BETTER


def test_lines_behind_are_those_that_another_server_wins() -> None:
    rows = [
        sample(server, "linear", at, read_tokens=read + at, cpu_s=cpu + at / 50, requests=10)
        for server, read, cpu in ((HEARTH, 1_000, 9.0), ("mlx_lm", 3_000, 2.0))
        for at in range(5)
    ]
    lines = PageLines(results(*rows, rounds=5))
    (behind,) = lines.behind
    assert (behind.workload, behind.measure.name) == ("linear", "cpu_s")
    assert [server for server, _ in behind.ahead] == ["mlx_lm"]
    assert behind.factor == pytest.approx(9.04 / 2.04)
    # Each read_ measure that can be made of the samples, and the CPU.
    assert sorted(lines.standings(), key=str) == [Standing.BETTER, Standing.WORSE]


def test_lines_behind_of_a_measure_begin_with_the_widest() -> None:
    costs = {"linear": (9.0, 8.0), "live": (9.0, 2.0), "restart": (9.0, 5.0)}
    rows = [
        sample(server, workload, at, cpu_s=cpu + at / 50, memory_bytes=1e9 * cpu + at)
        for workload, pair in costs.items()
        for server, cpu in zip((HEARTH, "mlx_lm"), pair, strict=True)
        for at in range(5)
    ]
    lines = PageLines(results(*rows, rounds=5))
    cpu, memory = lines.behind_by_measure(list(costs))
    assert [each.workload for each in cpu] == ["live", "restart", "linear"]
    assert {each.measure.name for each in memory} == {"memory_bytes"}
    assert lines.behind_by_measure(["answers"]) == []


def test_a_line_with_failures_is_not_compared() -> None:
    rows = [
        sample(server, "linear", at, read_tokens=read, failed=1)
        for server, read in ((HEARTH, 1_000), ("mlx_lm", 10))
        for at in range(5)
    ]
    lines = PageLines(results(*rows, rounds=5))
    assert lines.behind == []
    assert Standing.FAILED in set(lines.standings())
