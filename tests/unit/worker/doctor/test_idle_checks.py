"""Tests for worker/doctor/idle_checks.py: when checks run, what stops them, what stays of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from hearth.worker.doctor.findings import CheckResult, Findings, FindingsFile, Subject
from hearth.worker.doctor.idle_checks import ATTEMPTS_MAX, IDLE_BEFORE_CHECKS_S, IdleChecks, is_due

SUBJECT = Subject("chip", "cpu", "ab", "1", "1")
OK = CheckResult("cuts", "ok")


class ScriptedRun:
    """Stands in for a CheckRun of three steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.dropped = 0

    @property
    def running(self) -> str:
        return "cuts"

    def step(self) -> bool:
        self.steps += 1
        return self.steps < 3

    def drop(self) -> None:
        self.dropped += 1
        self.steps = 0

    def findings(self) -> Findings:
        return Findings(SUBJECT, "float32", (OK,) if self.steps else (), exact=True)


class Bench:
    """Idle checks with a clock that is set by hand."""

    def __init__(self, directory: Path, found: Findings | None = None, wanted: bool = True) -> None:
        self.now = 1000.0
        self.runs: list[ScriptedRun] = []
        self.file = FindingsFile(directory, SUBJECT)
        self.checks = IdleChecks(self._run, self.file, found, wanted, lambda: self.now)  # type: ignore[arg-type]

    def _run(self) -> ScriptedRun:
        self.runs.append(ScriptedRun())
        return self.runs[-1]

    def rest(self) -> None:
        self.now += IDLE_BEFORE_CHECKS_S


def test_nothing_is_checked_before_a_minute_of_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert not bench.checks.step() and bench.runs == []
    bench.now += IDLE_BEFORE_CHECKS_S - 1
    bench.checks.interrupt()  # a request
    bench.now += IDLE_BEFORE_CHECKS_S - 1
    assert not bench.checks.step() and bench.runs == []
    bench.now += 1
    assert bench.checks.step() and bench.runs[0].steps == 1


def test_what_was_found_is_kept_and_the_checks_run_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.rest()
    assert [bench.checks.step() for _ in range(3)] == [True, True, False]
    assert bench.checks.report()["state"] == "idle"
    kept = bench.file.load()
    assert kept is not None and kept.checks == (OK,) and kept == bench.checks.found
    bench.rest()
    assert not bench.checks.step() and len(bench.runs) == 1
    assert not is_due(kept, "float32")


def test_a_request_drops_the_check_and_the_run_goes_on_after_another_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.rest()
    bench.checks.step()
    bench.checks.interrupt()
    assert bench.runs[0].dropped == 1
    assert not bench.checks.step()
    assert bench.checks.report()["state"] == "running"
    bench.rest()
    while bench.checks.step():
        pass
    assert len(bench.runs) == 1 and bench.checks.found is not None


def test_checks_that_end_the_process_are_tried_three_times(tmp_path: Path) -> None:
    found = None
    for attempt in range(1, ATTEMPTS_MAX + 1):
        assert is_due(found, "float32")
        bench = Bench(tmp_path, found)
        bench.rest()
        bench.checks.step()  # the process ends here
        found = bench.file.load()
        assert found is not None and (found.checks, found.attempts) == ((), attempt)
    assert not is_due(found, "float32")


def test_they_run_again_at_once_when_somebody_asks(tmp_path: Path) -> None:
    old = Findings(SUBJECT, "float32", (replace(OK, name="old"),), float16=True)
    bench = Bench(tmp_path, old, wanted=False)
    bench.rest()
    assert not bench.checks.step()
    bench.checks.run_again()
    assert bench.checks.step(), "no minute of rest is waited for"
    assert bench.file.load() is None and bench.checks.found == old, "kept until there is better"
    while bench.checks.step():
        pass
    kept = bench.file.load()
    assert kept is not None and kept.checks == (OK,)
    assert kept.float16 is True, "what this run did not look at stays"


def test_other_weights_are_checked_anew() -> None:
    found = Findings(SUBJECT, "bfloat16", (OK,))
    assert is_due(found, "float16") and not is_due(found, "bfloat16") and is_due(None, "bfloat16")


def test_a_disk_that_refuses_keeps_nothing_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    bench = Bench(tmp_path)
    monkeypatch.setattr(FindingsFile, "save", full)
    bench.rest()
    while bench.checks.step():
        pass
    assert bench.checks.found is not None and "cannot be kept" in caplog.text
