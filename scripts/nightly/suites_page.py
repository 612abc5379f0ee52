"""Writes docs/third-party-suites.md from a run's JSON and the list of known failures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.nightly.known_failures import Cause, Rule
from scripts.nightly.suites import NOT_RUN

RUN: Final = Path(__file__).with_name("last_run.json")
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "third-party-suites.md"
HEAD: Final = """\
# Other projects' tests
`.ci/nightly` runs these suites, each at one version, against a real Hearth with the builtin model.
It fails when something fails that is not listed below, when a test meets a status of 500 or more,
when Hearth logs an error of its own, and when it does not answer at the end. It tells which tests
pass although they are listed. `.ci/nightly --write` writes this page; do not edit it.

<!-- not run: installs other projects' packages and takes minutes -->
```sh
.ci/nightly                               # all suites; pip and git fetch them
.ci/nightly --suite openai-chat           # one
.ci/nightly --model mlx-community/Qwen3.5-9B-OptiQ-4bit   # what only pocket cannot do must pass too
.ci/nightly --sources DIR                 # DIR has the sdists, and OWNER+NAME/repo git directories
```
Sources and the environments of their packages are kept in `~/.cache/hearth-nightly`. Hearth runs
with its defaults, but for names that the tests ask for, a tiny embedding model, a temperature of 0,
and thinking that is off unless a request asks for it: some tests allow ten tokens for an answer.

The tests are strangers' code, at versions that are pinned. They get an empty home, and neither they
nor any process beside them has a variable that holds a key; but they run as you, and can read what
you can read. Who minds runs them as a user of their own, or in a container.

The SDKs' tests are written for a mock server that takes any value: most of what fails names things
that never were. Each is run with several clients (loose, strict, aiohttp). Those of empty paths
pass without asking the server.
"""
CAUSES: Final = {
    Cause.OURS: "Hearth does something wrong or lacks something that it should have",
    Cause.NOT_SERVED: "Hearth has no such resource and says so with 404 or 405",
    Cause.REFUSED: "The request asks for what is not there or not allowed; 4xx is right",
    Cause.TEST: "The test asks for more than the API promises",
    Cause.MACHINE: "The machine has not what the test needs; the test is skipped",
    Cause.MODEL: "Pocket cannot do it. With `--model` these are not excused",
}


def page_of(run: Mapping[str, Any], rules: Sequence[Rule]) -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *_results(run), *_failures(run, rules), *_left_out()])


def _results(run: Mapping[str, Any]) -> Iterator[str]:
    rows = run["suites"]
    passed = sum(row["passed"] for row in rows)
    known = sum(sum(row["known"].values()) for row in rows)
    unknown = sum(len(row["unknown"]) for row in rows)
    yield "## What passes"
    yield (
        f"Of {passed + known + unknown:,} tests {passed:,} pass; {known:,} fail for a reason below"
        + (f"; {unknown:,} fail without one." if unknown else ".")
    )
    yield "\n| suite | what it is | version | pass | known | not known | s |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        counts = f"{row['passed']} | {sum(row['known'].values())} | {len(row['unknown'])}"
        counts = "did not run | | " if row["did_not_run"] else counts
        source = row["source"].split("/")[-1]
        seconds = f"{row['seconds']:.0f}"
        yield f"| {row['suite']} | {row['about']} | {source} | {counts} | {seconds} |"
    yield ""


def _failures(run: Mapping[str, Any], rules: Sequence[Rule]) -> Iterator[str]:
    counts = {
        (row["suite"], why): count for row in run["suites"] for why, count in row["known"].items()
    }
    gone = counts.keys() - {(rule.suite, rule.why) for rule in rules}
    assert not gone, f"the run has reasons that the list has not; run these again: {sorted(gone)}"
    yield "## What fails, and why"
    for cause, about in CAUSES.items():
        found = [rule for rule in rules if rule.cause is cause]
        found = [rule for rule in found if (rule.suite, rule.why) in counts]
        yield f"### {cause.value.capitalize()}\n{about}."
        if not found:
            yield "\nNone.\n"
            continue
        yield "\n| suite | tests | why |\n|---|---|---|"
        for rule in found:
            yield f"| {rule.suite} | {counts[rule.suite, rule.why]} | {rule.why} |"
        yield ""


def _left_out() -> Iterator[str]:
    yield "## What is not run"
    yield "| what | why |\n|---|---|"
    for what, why in NOT_RUN:
        yield f"| {what} | {why} |"
    yield ""
