"""Runs each suite against one real Hearth, and judges what came of it."""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from scripts.nightly.environments import CACHE_DIR, python_of, variables
from scripts.nightly.known_failures import Judgement, Rule, judge
from scripts.nightly.outcomes import Outcome, read_exit, read_junit, read_summary
from scripts.nightly.sources import FetchError, place_address, unpacked
from scripts.nightly.suites import Kind, Suite

END_S_MAX: Final = 10.0
# pytest tells where a test hangs before the suite's limit ends it.
HANGS_S: Final = 90
TAIL_CHARS: Final = 20_000
NO_TESTS_RAN: Final = (2, 3, 4)  # pytest: interrupted, internal error, wrong usage
_LOGGED_ERROR: Final = re.compile(r"^\S+ \S+ [EC] .*|^Traceback .*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Night:
    """Where a night's suites run."""

    port: int
    work_dir: Path
    sources_dir: Path | None
    rules: Sequence[Rule]
    is_pocket: bool
    cache_dir: Path = CACHE_DIR

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class SuiteError(Exception):
    """A suite as a whole did not run to its end; the text says why."""


def run_suite(suite: Suite, night: Night) -> tuple[Judgement, float]:
    """Run one suite; return what it came to and the seconds that it took."""
    began = time.monotonic()
    try:
        outcomes = _outcomes(suite, night)
    except (FetchError, SuiteError, ValueError) as error:
        judgement = Judgement(error=str(error))
    else:
        judgement = judge(suite.name, outcomes, night.rules, is_pocket=night.is_pocket)
    return judgement, time.monotonic() - began


def logged_errors(log: str) -> list[str]:
    """Return the lines of Hearth's log that tell of an error of its own."""
    return _LOGGED_ERROR.findall(log)


def command_of(suite: Suite, python: Path, night: Night, report: Path) -> list[str]:
    """Return the command that runs `suite`."""
    given = {"url": night.url, "port": str(night.port)}
    arguments = [word.format(**given) for word in suite.arguments]
    if suite.kind is not Kind.PYTEST:
        return [str(python), *arguments]
    plugin = ("-p", suite.plugin) if suite.plugin else ()
    return [
        *(str(python), "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"),
        *("-o", "addopts=", "-o", f"faulthandler_timeout={HANGS_S}", f"--junitxml={report}"),
        *plugin,
        *(word.format(**given) for word in suite.options),
        *arguments,
    ]


def _outcomes(suite: Suite, night: Night) -> list[Outcome]:
    """Run `suite` and read what it found.

    Raises:
        FetchError: its source or its packages are not to be had.
        SuiteError: it did not end in time, or broke off.
    """
    python = python_of(suite.packages, night.cache_dir)
    directory = unpacked(
        suite.source, night.cache_dir, night.sources_dir, night.work_dir / suite.name
    )
    place_address(suite, directory, night.url)
    report = night.work_dir / f"{suite.name}.xml"
    given = {"url": night.url, "port": str(night.port)}
    home = night.work_dir / "home"
    home.mkdir(exist_ok=True)
    environment = {
        **variables(home),
        "PYTHONPATH": os.pathsep.join((str(directory), str(Path(__file__).parent / "plugins"))),
        **{name: value.format(**given) for name, value in suite.environment.items()},
    }
    command = command_of(suite, python, night, report)
    with tempfile.TemporaryFile() as output:
        status = _status(command, directory, environment, output, suite.limit_s)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if suite.kind is Kind.EXIT:
        return read_exit(suite.name, status, text)
    if suite.kind is Kind.SUMMARY:
        return read_summary(text[-TAIL_CHARS:])
    if status in NO_TESTS_RAN or not report.exists():
        raise SuiteError(f"pytest ended with {status}:\n{text[-2000:]}")
    return read_junit(report.read_text())


def _status(
    command: list[str],
    directory: Path,
    environment: dict[str, str],
    output: IO[bytes],
    limit_s: int,
) -> int:
    """Run a command in a group of its own, which is ended as a whole; return its exit status."""
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S_MAX)
            raise SuiteError(f"it did not end within {limit_s} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
