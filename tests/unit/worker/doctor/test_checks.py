"""Real architectures pass the checks; planted faults are found by the check for each."""

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hearth.worker.doctor import measure_speed
from hearth.worker.doctor.check_answers import median_costs
from hearth.worker.doctor.check_context import CheckContext, timed
from hearth.worker.doctor.findings import CheckResult, Findings
from tests.helpers.by_day import by_day
from tests.helpers.worker import planted_faults
from tests.helpers.worker.checked_fixture import checked, context_of, run_of
from tests.helpers.worker.planted_faults import (
    DraftDependentModel,
    ForgetfulDecoding,
    Plant,
    RowDependentModel,
    UnknownCacheModel,
)

# Full attention; states; windows; a compressed cache (MLA).
FIXTURES: Final = ("qwen3", "qwen3_5", "gemma3_text", "glm4_moe_lite")
NAMES: Final = by_day(FIXTURES, ["qwen3_5", "gemma3_text"])
WARM: Final = ("exact", "rewinds", "restores")
CORE: Final = ("speed", "logits", *WARM, "default", "batches", "drafts")


@functools.cache
def sound(name: str) -> CheckContext:
    """Return the context of a run of the fixture with no fault, of all that no clock decides."""
    context = context_of(name)
    checked(context, *CORE)
    return context


def found(name: str, *names: str, **how: Any) -> dict[str, CheckResult]:
    """Return what checks of the fixture tell, which begin with the sound run's cold answers."""
    context = context_of(name, **how)
    context.canary, context.cold = sound(name).canary, sound(name).cold
    context.prefill_tokens_per_s = 1e6  # no prompt is too long for one forward
    return checked(context, *names)


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_model_passes(name: str) -> None:
    results = sound(name).results
    assert set(results) == set(CORE)
    assert {check.name: (check.verdict, check.reason) for check in results.values()} == {
        each: ("ok", results["speed"].reason if each == "speed" else "") for each in CORE
    }
    for each in WARM:
        assert results[each].figures["bits_equal"] is True, each
    assert results["exact"].figures["tokens"] == 5 * 3
    assert results["rewinds"].figures["in_place"] == 1, "else nothing was taken back"


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_differs_by_rows_is_found(name: str) -> None:
    """By a thousandth of what a log probability spreads: no token changes, as none may have to."""
    spread = float(np.mean([answer.logprobs.std() for answer in sound(name).cold]))
    wrap = functools.partial(RowDependentModel, error=3e-3 * spread)
    results = found(name, "batches", model=wrap)
    assert results["batches"].verdict == "fault", results["batches"]


@pytest.mark.parametrize(
    ("name", "plant", "checks"),
    [
        *(
            ("qwen3_5", plant, {"restores"})
            for plant in (planted_faults.stale_state, planted_faults.wrong_positions)
        ),
        *(
            pytest.param(name, plant, {"restores"}, marks=pytest.mark.night)
            for name in ("qwen3", "gemma3_text", "glm4_moe_lite")
            for plant in (planted_faults.stale_state, planted_faults.wrong_positions)
        ),
        ("qwen3_5", planted_faults.stale_rewind, {"exact", "rewinds"}),
        ("gemma3_text", planted_faults.offset_off_by_one, {"exact"}),
        ("glm4_moe_lite", planted_faults.bytes_lost_in_files, {"restores"}),
        ("qwen3", planted_faults.nothing_is_reused, {"exact", "restores"}),
    ],
)
def test_a_planted_fault_is_found_by_the_checks_for_it(
    name: str, plant: Plant, checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound(name)
    plant(monkeypatch)
    results = found(name, *checks)
    faults = {check.name for check in results.values() if check.verdict == "fault"}
    assert checks <= faults


def test_log_probabilities_that_are_no_numbers_are_found() -> None:
    wrap = functools.partial(RowDependentModel, error=float("nan"), rows_min=1)
    context = context_of("qwen3", model=wrap, depth_max=120)
    results = checked(context, "speed", "logits")
    assert results["logits"].verdict == "fault"
    assert results["logits"].figures["odd_tokens"] == 5 * 3


def test_where_default_reuse_says_other_tokens_auto_becomes_exact() -> None:
    """No fault: the same forwards say the same; but what decoding writes is not what is read."""
    context = context_of("qwen3", model=ForgetfulDecoding, answer_tokens=8)
    run = run_of(context, "speed", "logits", "default")
    while run.step():
        pass
    findings = run.findings()
    assert findings.exact is True and not findings.faults, findings
    assert context.results["default"].verdict == "differs"
    assert run_of(sound("qwen3"), *CORE).findings().exact is False


def test_one_check_that_breaks_is_a_fault_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(5, "it is broken", str(Path.home() / "secret"))

    context = context_of("qwen3", depth_max=120)
    monkeypatch.setattr("hearth.worker.doctor.check_answers.median_costs", broken)
    results = checked(context, "speed", "logits", "drafts", "batches")
    assert results["drafts"].verdict == "fault"
    assert results["drafts"].reason == "the check broke: OSError it is broken"
    assert results["batches"].verdict == "ok"


def test_what_does_not_fit_beside_what_is_kept_is_left_out() -> None:
    context = context_of("qwen3", depth_max=120)
    checked(context, "speed", "logits")
    context.room = lambda: 1000
    results = checked(context, "exact", "batches", "drafts")
    assert {check.name for check in results.values() if check.verdict == "left out"} == {
        *("exact", "rewinds", "restores", "batches", "drafts"),
    }
    assert "0 MB are free" in results["exact"].reason


def test_what_finds_no_time_is_left_out_and_told() -> None:
    now = iter(range(10_000))
    context = context_of("qwen3", depth_max=120, seconds_max=30)
    context.clock = lambda: float(next(now))  # each step takes a second
    results = checked(context)
    assert results["speed"].verdict == "ok" and results["SSD"].verdict == "left out"
    assert results["SSD"].reason == "the 30 s of all checks were spent"
    assert context.spent_s <= 30 + 20


@pytest.mark.parametrize(("check", "steps"), [("exact", 5), ("drafts", 60)])
def test_a_check_that_was_dropped_begins_anew_and_frees_what_it_held(
    check: str, steps: int
) -> None:
    context = context_of("qwen3", depth_max=120)
    run = run_of(context, "speed", "logits", check)
    while run.running != check:
        run.step()
    for _ in range(steps):
        run.step()
    assert run.running == check
    spent, held = context.spent_s, mx.get_active_memory()
    run.drop()
    run.drop()
    assert context.spent_s < spent and mx.get_active_memory() < held
    while run.step():
        pass
    assert {check.verdict for check in run.findings().checks} == {"ok"}


@pytest.mark.parametrize("is_changed", [False, True])
def test_bytes_that_the_disk_gives_back_changed_are_found_and_the_day_is_charged(
    is_changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"directory": tmp_path, "ssd_bytes_per_day": 40 << 20}
    if is_changed:
        monkeypatch.setattr(
            measure_speed, "_piece", lambda *_: os.urandom(measure_speed.PIECE_BYTES)
        )
    results = checked(context_of("qwen3", **how), "SSD")
    assert results["SSD"].verdict == ("fault" if is_changed else "ok"), results
    assert [path.name for path in (tmp_path / "doctor").iterdir()] == []
    again = checked(context_of("qwen3", **how), "SSD")["SSD"]
    assert "spent" in again.reason, "32 of 40 MB a day are written"


# Full attention; states; windows, which the canary is longer than.
DRAFTED = {"qwen3": 120, "qwen3_5": 120, "gemma3_text": 200}
ANSWER_TOKENS = 5
WIDTHS = 3  # forwards of 2, 4 and 8 rows


def findings_of(name: str, **how: Any) -> tuple[Findings, CheckResult]:
    depth = DRAFTED.get(name, 120)
    context = context_of(name, **({"depth_max": depth, "answer_tokens": ANSWER_TOKENS} | how))
    run = run_of(context, "speed", "logits", "drafts")
    while run.step():
        pass
    return run.findings(), context.results["drafts"]


@pytest.mark.parametrize("name", by_day(DRAFTED, ["qwen3_5"]))
def test_drafts_of_a_sound_model_are_alike_and_costs_are_those_of_its_rows(name: str) -> None:
    findings, result = findings_of(name)
    assert (result.verdict, result.reason) == ("ok", "")
    assert result.figures["tokens"] == 5 * WIDTHS * (ANSWER_TOKENS - 1), "each that was drafted"
    assert findings.drafts_alike is True
    assert findings.row_costs is not None
    assert sorted(findings.row_costs) == [1, 2, 4, 8] and findings.row_costs[1] == 1.0
    assert all(cost > 0 for cost in findings.row_costs.values())


@pytest.mark.parametrize("name", by_day(DRAFTED, ["qwen3_5"]))
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
    def instant() -> Iterator[None]:
        yield

    now_s = 1.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    forward = timed(instant())  # type: ignore[arg-type]
    next(forward)
    now_s = 100.0
    with pytest.raises(StopIteration) as end:
        next(forward)
    assert end.value.value == [0]
