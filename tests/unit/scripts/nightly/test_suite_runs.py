"""A suite runs from its archive to its judgement, and one that hangs is ended with its children."""

import io
import os
import re
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from scripts.nightly.environments import directory_of
from scripts.nightly.known_failures import Cause, Rule
from scripts.nightly.run_suites import Night, run_suite
from scripts.nightly.suites import Kind, Origin, Packages, Source, Suite

pytestmark = pytest.mark.process

PACKAGES = Packages("none", ("none==1",))
SOURCE = Source("their", Origin.SDIST, "their", "1")
RULES = (Rule("s", re.compile(r".*::test_known"), re.compile("404"), Cause.REFUSED, "No such."),)
TESTS = """
import os
def test_passes():
    assert os.environ["URL"] == "http://127.0.0.1:4321/v1"
    assert "HEARTH_TEST_KEY" not in os.environ
def test_known():
    raise RuntimeError("Error code: 404")
def test_unknown():
    raise RuntimeError("Error code: 400")
"""
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pid", "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    """A night whose source is an archive and whose environment is this one."""
    monkeypatch.setenv("HEARTH_TEST_KEY", "secret")
    with tarfile.open(tmp_path / "their-1.tar.gz", "w:gz") as tar:
        for name, text in (("test_theirs.py", TESTS), ("hangs.py", HANGS)):
            entry = tarfile.TarInfo(f"their-1/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    cache_dir, work_dir = tmp_path / "cache", tmp_path / "work"
    python = directory_of(PACKAGES, cache_dir) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    work_dir.mkdir()
    return Night(4321, work_dir, tmp_path, RULES, is_pocket=True, cache_dir=cache_dir)


def test_a_suite_is_unpacked_run_and_judged(night: Night) -> None:
    environment = {"URL": "{url}/v1"}
    arguments = ("test_theirs.py",)
    suite = Suite("s", "theirs", SOURCE, PACKAGES, Kind.PYTEST, arguments, environment)

    judged, _ = run_suite(suite, night)

    assert judged.error == ""
    assert judged.passed == 1
    assert judged.known == {"No such.": 1}
    assert [outcome.test for outcome in judged.unknown] == ["test_theirs::test_unknown"]


def test_a_suite_that_hangs_is_ended_with_its_children(night: Night) -> None:
    suite = Suite("s", "theirs", SOURCE, PACKAGES, Kind.EXIT, ("hangs.py",), limit_s=3)

    judged, _ = run_suite(suite, night)

    assert "did not end within 3 s" in judged.error
    pid = int((night.work_dir / "s" / "their-1" / "pid").read_text())
    assert _ends(pid)


def test_a_file_that_pytest_cannot_read_is_no_good_suite(night: Night) -> None:
    suite = Suite("s", "theirs", SOURCE, PACKAGES, Kind.PYTEST, ("missing.py",))

    judged, _ = run_suite(suite, night)

    assert not judged.is_good
    assert "pytest ended with 4" in judged.error


def _ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
            os.kill(pid, 0)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False
