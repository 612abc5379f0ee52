"""The suite tells what failed, what it left out, and when all of it ran last."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.helpers import run_suite

NOW = datetime.now(UTC)
SOURCE = """
import os, pytest

def test_a_stranger(): assert os.environ["HOME"] != {home!r}
@pytest.mark.night
def test_of_the_night(): assert False
"""


@pytest.mark.process
def test_a_circle_has_a_strangers_home_and_says_what_it_left_out_and_what_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_suite.PROJECT_DIR / "tests" / f"test_of_{tmp_path.name}.py"
    commands = {
        "good": run_suite.pytest_of("-m", run_suite.LEFT_OUT, str(file), processes=1),
        "bad": run_suite.pytest_of("-m", "night", str(file), processes=1),
    }
    monkeypatch.setattr(run_suite, "parts_of", lambda circle: commands)
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        file.write_text(SOURCE.format(home=str(tmp_path)))
        assert run_suite.run_circle("test") == 1
    finally:
        file.unlink()
    said = capfd.readouterr().out
    assert "1 passed" in said and "not run: 1 night" in said
    assert "== test: FAILED: bad" in said and "test all" in said


@pytest.mark.parametrize(("days", "is_late"), [(1, False), (7, False), (8, True)])
def test_a_night_that_has_not_run_for_a_week_is_told(
    tmp_path: Path, days: int, is_late: bool
) -> None:
    assert run_suite.night_told(tmp_path / "night", NOW) == "`test all` never ran here"
    (tmp_path / "night").write_text(f"{(NOW - timedelta(days=days)).isoformat()} passed")
    told = run_suite.night_told(tmp_path / "night", NOW)
    assert f"{days} days ago and passed" in told and ("time to run" in told) is is_late
