"""Judges what did not pass by the list of what is known not to, which says why for each.

A failure that no rule fits fails the night, and so does each failure of the server itself (5xx),
which no rule excuses. A test that a rule names and that passes is told: the rule can go.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from scripts.nightly.outcomes import Outcome, Result

LIST: Final = Path(__file__).with_name("known_failures.json")


class Cause(StrEnum):
    """Why a test does not pass."""

    NOT_SERVED = "not served"  # Hearth has no such resource
    REFUSED = "refused"  # the request asks for what is not there or not allowed: 4xx is right
    TEST = "the test's own"  # it asks more than the API promises
    MACHINE = "this machine"  # it has not what the test needs, which is skipped
    MODEL = "the model"  # pocket cannot do it: a real model must
    OURS = "ours to mend"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known not to pass: tests whose whole name, and whose failure, fit both patterns."""

    suite: str
    tests: re.Pattern[str]
    text: re.Pattern[str]
    cause: Cause
    why: str

    def fits(self, outcome: Outcome) -> bool:
        return bool(self.tests.fullmatch(outcome.test) and self.text.search(outcome.text))


@dataclass(slots=True)
class Judgement:
    """What one suite came to."""

    passed: int = 0
    known: dict[str, int] = field(default_factory=dict)  # why -> how many tests
    unknown: list[Outcome] = field(default_factory=list)
    listed_but_passed: list[str] = field(default_factory=list)
    error: str = ""  # the suite as a whole did not run

    @property
    def is_good(self) -> bool:
        return not self.unknown and not self.error


def load_rules(path: Path = LIST) -> tuple[Rule, ...]:
    """Return the rules in their order; the first that fits judges.

    Raises:
        ValueError: the file is wrong.
    """
    rows = json.loads(path.read_text())
    return tuple(_read_rule(row) for row in rows)


def judge(
    suite: str, outcomes: Iterable[Outcome], rules: Sequence[Rule], *, is_pocket: bool
) -> Judgement:
    """Judge the outcomes of `suite`. What only pocket cannot do is excused for pocket alone."""
    judgement = Judgement()
    at = [
        rule
        for rule in rules
        if rule.suite == suite and (is_pocket or rule.cause is not Cause.MODEL)
    ]
    for outcome in outcomes:
        if outcome.result is Result.PASSED:
            judgement.passed += 1
            if any(rule.tests.fullmatch(outcome.test) for rule in at):
                judgement.listed_but_passed.append(outcome.test)
            continue
        fitting = [rule.why for rule in at if rule.fits(outcome)]
        if outcome.is_server_error or not fitting:
            judgement.unknown.append(outcome)
        else:
            judgement.known[fitting[0]] = judgement.known.get(fitting[0], 0) + 1
    if not judgement.passed and not judgement.known and not judgement.unknown:
        judgement.error = "no test ran"
    return judgement


def _read_rule(row: dict[str, str]) -> Rule:
    if set(row) != {"suite", "tests", "text", "cause", "why"}:
        raise ValueError(f"a rule has suite, tests, text, cause and why, and not {sorted(row)}")
    return Rule(
        row["suite"],
        re.compile(row["tests"]),
        re.compile(row["text"]),
        Cause(row["cause"]),
        row["why"],
    )
