#!/usr/bin/env python
"""Tries the newest LiteLLM beside the pinned one: runs what rests on it and says what breaks.

    python -m scripts.litellm_newest [--version X | --wheel FILE] [--into DIR] [--whole]

LiteLLM and what it needs go into a directory of their own, which comes first for the tests alone:
the server's own packages stay. `--wheel` takes a file, and nothing from the network. `--whole` runs
the tests of whole servers (tests/e2e/gateway) too, which takes minutes.
Exit status 0: nothing broke; 1: something did; 2: it could not be tried.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.shared.settings_from_env import PROJECT_DIR

TESTS: Final = ("tests/unit/proxy/gateway", "tests/property/gateway")
WHOLE_TESTS: Final = ("tests/e2e/gateway",)
# It holds the installed version to pyproject.toml, which is what is tried here.
LEFT_OUT: Final = (
    "tests/unit/proxy/gateway/test_litellm_contract.py::test_the_version_is_the_pinned_one"
)
REASON_CHARS_MAX: Final = 160
_NEWEST: Final = re.compile(r"^litellm \(([^)\s]+)\)", re.MULTILINE)


class NotTried(Exception):
    """The tests could not be run; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """What one run of the tests came to."""

    passed: int
    broken: tuple[str, ...]  # a line each: the test, and the first line of why

    def report(self, version: str) -> str:
        told = f"LiteLLM {version}: {self.passed} tests passed, {len(self.broken)} broke"
        return "\n  ".join((told, *self.broken))


def newest_in(answer: str) -> str:
    """Return the newest version in what `pip index versions litellm` printed."""
    found = _NEWEST.search(answer)
    if found is None:
        raise NotTried(f"pip names no version of litellm: {answer.strip()[:REASON_CHARS_MAX]!r}")
    return found[1]


def pip_command(directory: Path, what: str, *, is_file: bool) -> list[str]:
    """Return the command that installs `what` into `directory`."""
    offline = ["--no-deps", "--no-index"] if is_file else []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory)]
    return [*pip, *offline, what]


def test_command(report: Path, *, whole: bool) -> list[str]:
    """Return the command that runs the tests and writes what came of them to `report`."""
    tests = (*TESTS, *(WHOLE_TESTS if whole else ()))
    options = ["-q", "--deselect", LEFT_OUT, f"--junitxml={report}"]
    return [sys.executable, "-m", "pytest", *options, *tests]


def outcome_in(report: str) -> Outcome:
    """Return what the JUnit report of a run says."""
    rows = list(ElementTree.fromstring(report).iter("testcase"))
    broken = tuple(line for row in rows for line in _breaks(row))
    failed = sum(1 for row in rows if any(True for _ in _breaks(row)))
    skipped = sum(1 for row in rows if row.find("skipped") is not None)
    return Outcome(len(rows) - failed - skipped, broken)


def _breaks(row: ElementTree.Element) -> Iterator[str]:
    for kind in ("failure", "error"):
        for found in row.findall(kind):
            why = (found.get("message") or "").strip().splitlines() or [kind]
            yield f"{row.get('classname')}::{row.get('name')}: {why[0][:REASON_CHARS_MAX]}"


def version_in(directory: Path) -> str:
    """Return the version of LiteLLM that lies in `directory`."""
    for path in directory.glob("litellm-*.dist-info"):
        return path.name.removeprefix("litellm-").removesuffix(".dist-info")
    raise NotTried(f"{directory} has no LiteLLM in it.")


def run(command: list[str], **environ: str) -> str:
    """Return what `command` printed. Raises: NotTried: it failed."""
    done = subprocess.run(
        command, env=os.environ | environ, cwd=PROJECT_DIR, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason told").splitlines()[-1]
        raise NotTried(f"{' '.join(command[1:4])} failed: {last}")
    return done.stdout


def tried(directory: Path, *, whole: bool) -> Outcome:
    """Run the tests with what lies in `directory` before everything else."""
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        done = subprocess.run(test_command(report, whole=whole), env=environ, cwd=PROJECT_DIR)
        if not report.exists():
            raise NotTried(f"pytest ended with status {done.returncode} and told nothing.")
        return outcome_in(report.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--version", help="instead of the newest")
    chosen.add_argument("--wheel", type=Path, help="a wheel of LiteLLM; no network is used")
    parser.add_argument("--into", type=Path, help="keep the installed packages here")
    parser.add_argument("--whole", action="store_true", help="run tests/e2e/gateway too")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            directory = options.into or Path(temporary)
            if options.wheel is None:
                pip = [sys.executable, "-m", "pip", "index", "versions", "litellm"]
                version = options.version or newest_in(run(pip))
                run(pip_command(directory, f"litellm=={version}", is_file=False))
            else:
                wheel = str(options.wheel.resolve())
                run(pip_command(directory, wheel, is_file=True))
            outcome = tried(directory, whole=options.whole)
            print(outcome.report(version_in(directory)))
    except NotTried as error:
        print(f"litellm_newest: {error}", file=sys.stderr)
        return 2
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
