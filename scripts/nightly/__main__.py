"""Runs other projects' suites against a real Hearth, and prints what failed and is not known to.

    .ci/nightly [--suite NAME ...] [--model MODEL]

known_failures.json tells what is known not to pass, and why. Nothing excuses a failure of the
server itself (5xx), and what needs sense is excused for the default alone: random weights, which
are fast. Strangers' tests run as you and can read what you can; they get an empty home and no
variable that holds a key.
Exit status: 0 all that failed is known and Hearth logged no error of its own, 1 not so.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from scripts.faults.own_server import OwnServer
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.nightly.sources import FetchError, python_of, unpacked
from scripts.nightly.suites import SUITES, Suite

KNOWN: Final = Path(__file__).with_name("known_failures.json")
SUITE_S_MAX: Final = 600
SHOWN_CHARS: Final = 300
# `  1_plain: PASS`, `  PASS  Rapid fire`
CHECK: Final = re.compile(
    r"^\s+(?:(\w+): (PASS|FAIL|SKIP)\b:? ?(.*)|(PASS|FAIL|SKIP)\s{2,}(\S.*))$", re.MULTILINE
)
# As openai, anthropic, httpx and requests tell of a server's own failure.
SERVER_ERROR: Final = re.compile(
    r"Error code: 5\d\d|Server [Ee]rror '?5\d\d|\b5\d\d (?:Internal Server|Server) Error"
    r"|status_code: 5\d\d|InternalServerError"
)
LOGGED_ERROR: Final = re.compile(r"^\S+ \S+ [EC] .*|^Traceback .*", re.MULTILINE)

Outcome = tuple[str, str | None]  # a test, and why it did not pass; None where it did


def junit_outcomes(text: str) -> Iterator[Outcome]:
    """Yield the outcomes of pytest's report. Raises: ElementTree.ParseError: it is not whole."""
    for case in ElementTree.fromstring(text).iter("testcase"):
        bad = [found for found in case if found.tag in ("failure", "error", "skipped")]
        told = "\n".join(f"{found.get('message')}\n{found.text}" for found in bad)
        yield f"{case.get('classname')}::{case.get('name')}", told if bad else None


def summary_outcomes(text: str) -> list[Outcome]:
    """Return the outcomes of a program's last part, in which each check has its line."""
    found = {  # the last line of a check counts
        name or other.strip(): None if "PASS" in (first, last) else why
        for name, first, why, last, other in CHECK.findall(text)
    }
    return list(found.items())


def is_known(suite: str, outcome: Outcome, rules: list[dict[str, Any]]) -> bool:
    """Tell whether a rule excuses a test that did not pass: its whole name and its text fit."""
    test, why = outcome[0], outcome[1] or ""
    return not SERVER_ERROR.search(why) and any(
        re.fullmatch(rule["suites"], suite)
        and re.fullmatch(rule["tests"], test)
        and re.search(rule["text"], why)
        for rule in rules
    )


def run_suite(suite: Suite, url: str, work_dir: Path) -> list[Outcome]:
    """Run one suite in an environment and a process group of its own.

    Raises:
        FetchError, OSError, ValueError, TimeoutExpired, ParseError: it did not run to its end.
    """
    place = {"url": url, "port": url.rpartition(":")[2]}
    report, home = work_dir / f"{suite.name}.xml", work_dir / "home"
    home.mkdir(exist_ok=True)
    directory = unpacked(suite.source, suite.paths, work_dir / suite.name)
    for old, new in suite.replaced:
        program = directory / suite.arguments[-1]
        text = program.read_text()
        if old not in text:
            raise FetchError(f"{program} has no {old} any more: see how it is given its address")
        program.write_text(text.replace(old, new.format(**place)))
    pytest = (
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="),
        *("-o", "faulthandler_timeout=90", "--tb=line", f"--junitxml={report}"),
    )
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ},
        **{"HOME": str(home), "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1,localhost"},
        "PYTHONPATH": f"{directory}{os.pathsep}{Path(__file__).parent / 'plugins'}",
        **{name: value.format(**place) for name, value in suite.environment.items()},
    }
    with subprocess.Popen(
        [
            python_of(suite.packages),
            *(pytest if suite.kind == "pytest" else ()),
            *(argument.format(**place) for argument in suite.arguments),
        ],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        try:
            text = child.communicate(timeout=SUITE_S_MAX)[0].decode(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if suite.kind == "exit":
        return [(suite.name, text if child.returncode else None)]
    if suite.kind == "summary":
        return summary_outcomes(text)
    if not report.exists():
        raise ValueError(f"pytest ended with {child.returncode}: {text[-2 * SHOWN_CHARS :]}")
    return list(junit_outcomes(report.read_text()))


def is_good(suite: Suite, url: str, work_dir: Path, rules: list[dict[str, Any]]) -> bool:
    """Run a suite; print what failed and is not known to, and return whether nothing did."""
    try:
        outcomes = run_suite(suite, url, work_dir)
    except (
        *(FetchError, OSError, ValueError, ElementTree.ParseError),
        subprocess.TimeoutExpired,
    ) as error:
        outcomes = [("(the suite)", f"did not run: {error}")]
    failed = [outcome for outcome in outcomes if outcome[1] is not None]
    unknown = [outcome for outcome in failed if not is_known(suite.name, outcome, rules)]
    print(
        f"{suite.name}: {len(outcomes) - len(failed)} passed, "
        f"{len(failed) - len(unknown)} known, {len(unknown)} unknown",
        flush=True,
    )
    for test, why in unknown:
        print(f"  {test}", " ".join((why or "").split())[:SHOWN_CHARS], sep="\n    ")
    return bool(outcomes) and not unknown


def settings(model: str) -> dict[str, str]:
    """Return what differs from Hearth's defaults, so that all suites find what they ask for."""
    return {
        "MODEL_PATH": model,
        # Rapid-MLX's matrices ask for a family by its name.
        "PROXY_MODEL_ID": "qwen3.6-random",
        "MODEL_ALIASES": "default,model,model_id,string",
        "EMBEDDING_MODEL": str(embedding_checkpoint("bert")),
        # An answer of ten tokens, for which some suites ask, would be all thinking.
        "DEFAULT_THINKING": "false",
        # Random weights seldom end.
        "DEFAULT_MAX_TOKENS": "64",
        # Whether it calls a tool is not to change from night to night.
        "DEFAULT_TEMPERATURE": "0",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [suite.name for suite in SUITES]
    parser.add_argument("--suite", action="append", choices=names, help="only this one")
    parser.add_argument("--model", help="what Hearth serves, as MODEL_PATH; default random weights")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with us
    rules = [
        rule
        for rule in json.loads(KNOWN.read_text())
        if not (given.model and rule.get("needs_sense"))
    ]
    model = given.model or str(fixture_dir("qwen3", tiny=True))
    with (
        contextlib.closing(OwnServer(settings(model))) as server,
        tempfile.TemporaryDirectory(prefix="hearth-nightly-") as work_dir,
    ):
        asyncio.run(server.started())
        good = [
            is_good(suite, server.url, Path(work_dir), rules)
            for suite in SUITES
            if suite.name in (given.suite or names)
        ]
        logged = LOGGED_ERROR.findall(server.log.read_text(errors="replace"))
        if asyncio.run(server.told("/health")).get("status") != "ok":
            logged.append("Hearth does not answer any more.")
    print(*(f"Hearth logged: {line[:SHOWN_CHARS]}" for line in logged), sep="\n")
    return 0 if all(good) and not logged else 1


if __name__ == "__main__":
    sys.exit(main())
