"""The suite's parts run beside each other, and none of their failures is lost."""

import os
from pathlib import Path

import pytest

from tests.helpers.run_suite import DONT_COMPILE, NICE_MAX, Part, run_stage

pytestmark = pytest.mark.process

PATIENT = f"""
import os

def test_it_takes_what_others_leave_over():
    assert os.nice(0) == {NICE_MAX}
    assert getattr(os, "SCHED_BATCH", 0) == getattr(os, "sched_getscheduler", lambda _: 0)(0)
    assert {DONT_COMPILE!r} not in os.environ
"""


def test_parts_run_beside_each_other_and_each_says_how_it_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DONT_COMPILE, "1")
    own = os.nice(0)
    files = {"shown": "def test_one(): assert 'shown' == ''", "patient": PATIENT, "third": "1 / 0"}
    for name, source in files.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    quiet = ("-p", "no:cacheprovider")
    told = run_stage(
        [
            Part("shown", (*quiet, str(tmp_path / "test_shown.py"))),
            Part("patient", (*quiet, str(tmp_path / "test_patient.py")), True, is_patient=True),
            Part("third", (*quiet, str(tmp_path / "test_third.py"))),
        ]
    )
    said = capfd.readouterr().out
    assert [(name, code) for name, code, _ in told] == [("shown", 1), ("patient", 0), ("third", 2)]
    assert said.index("assert 'shown' == ''") < said.index("1 passed") < said.index("1 / 0")
    assert os.nice(0) == own, "it is the part that is patient, not who runs it"
