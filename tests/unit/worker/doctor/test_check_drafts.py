"""Tests for worker/doctor/check_drafts.py: whether drafts are alike, and what their rows cost."""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.doctor.check_drafts import median_costs, timed_forward
from hearth.worker.doctor.findings import CheckResult, Findings
from tests.helpers.models.by_day import by_day
from tests.helpers.worker.checked_fixture import context_of, run_of
from tests.helpers.worker.planted_faults import DraftDependentModel, UnknownCacheModel

# Full attention; states; windows, which the canary is longer than.
FIXTURES = {"qwen3": 120, "qwen3_5": 120, "gemma3_text": 200}
ANSWER_TOKENS = 5
WIDTHS = 3  # forwards of 2, 4 and 8 rows


def findings_of(name: str, **how: Any) -> tuple[Findings, CheckResult]:
    depth = FIXTURES.get(name, 120)
    context = context_of(name, **({"depth_max": depth, "answer_tokens": ANSWER_TOKENS} | how))
    run = run_of(context, "speed", "logits", "drafts")
    while run.step():
        pass
    return run.findings(), context.results["drafts"]


@pytest.mark.parametrize("name", by_day(FIXTURES, ["qwen3_5"]))
def test_drafts_of_a_sound_model_are_alike_and_costs_are_those_of_its_rows(name: str) -> None:
    findings, result = findings_of(name)
    assert (result.verdict, result.reason) == ("ok", "")
    assert result.figures["tokens"] == 5 * WIDTHS * (ANSWER_TOKENS - 1), "each that was drafted"
    assert findings.drafts_alike is True
    assert findings.row_costs is not None
    assert sorted(findings.row_costs) == [1, 2, 4, 8] and findings.row_costs[1] == 1.0
    assert all(cost > 0 for cost in findings.row_costs.values())


@pytest.mark.parametrize("name", by_day(FIXTURES, ["qwen3_5"]))
@pytest.mark.parametrize("error", [None, float("nan")], ids=["other tokens", "no numbers"])
def test_a_model_that_says_other_things_in_drafts_differs_and_has_no_fault(
    name: str, error: float | None
) -> None:
    findings, result = findings_of(name, model=functools.partial(DraftDependentModel, error=error))
    assert result.verdict == "differs" and findings.drafts_alike is False
    assert result not in findings.faults
    assert [f"{rows} rows: " in result.reason for rows in (2, 4, 8)] == [True] * WIDTHS
    assert findings.row_costs is not None, "a setting that drafts in any case goes by them"


def test_a_difference_that_changes_no_token_is_told_and_drafts_are_alike() -> None:
    findings, result = findings_of(
        "qwen3", model=functools.partial(DraftDependentModel, error=0.01)
    )
    assert result.verdict == "ok" and findings.drafts_alike is True
    assert result.figures["bits_equal"] is False
    largest = result.figures["largest"]
    assert isinstance(largest, float) and 0.01 <= largest <= 0.021, "what is added, and its norm"


def test_a_model_that_cannot_go_back_is_left_out_with_the_reason() -> None:
    findings, result = findings_of("qwen3", model=UnknownCacheModel)
    assert result.verdict == "left out" and "cannot be taken back" in result.reason
    assert findings.drafts_alike is None and findings.row_costs is None


@given(
    costs=st.lists(st.floats(0.5, 20), min_size=3, max_size=3),
    loads=st.lists(st.floats(0.1, 50), min_size=1, max_size=7),
)
def test_costs_do_not_depend_on_how_busy_the_machine_is(
    costs: list[float], loads: list[float]
) -> None:
    truth = dict(zip((1, 2, 4, 8), [1.0, *costs], strict=True))
    rounds = [{rows: load * cost for rows, cost in truth.items()} for load in loads]
    assert median_costs(rounds) == pytest.approx(truth)


def test_one_slow_forward_of_several_does_not_count() -> None:
    rounds = [{1: 1.0, 2: 1.5}, {1: 1.0, 2: 40.0}, {1: 9.0, 2: 1.5}, {1: 1.0, 2: 1.5}] * 2
    assert median_costs(rounds) == {1: 1.0, 2: 1.5}


def test_what_passes_between_two_steps_is_no_part_of_a_forwards_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Instant:
        def answer(self, ids: Sequence[int], count: int) -> Iterator[None]:
            yield

    now_s = 1.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    forward = timed_forward(Instant(), [1, 2])  # type: ignore[arg-type]
    next(forward)
    now_s = 100.0
    with pytest.raises(StopIteration) as end:
        next(forward)
    assert end.value.value == 0
