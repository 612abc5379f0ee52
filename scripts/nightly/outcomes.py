"""Reads what a suite found: pytest's JUnit file, or the lines with which a program ends."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

TEXT_CHARS_MAX: Final = 2_000
# `  1_plain: PASS`, `  PASS  Rapid fire`
_CHECK_FIRST: Final = re.compile(r"^\s+(\w+): (PASS|FAIL|SKIP)\b:? ?(.*)$")
_RESULT_FIRST: Final = re.compile(r"^\s+(PASS|FAIL|SKIP)\s{2,}(\S.*)$")
# As openai, anthropic, httpx and requests tell of a server's own failure.
_SERVER_ERROR: Final = re.compile(
    r"Error code: 5\d\d|Server [Ee]rror '?5\d\d|\b5\d\d (?:Internal Server|Server) Error"
    r"|status_code: 5\d\d|InternalServerError"
)


class Result(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one test of a suite came to. `text` says why it did not pass."""

    test: str
    result: Result
    text: str = ""

    @property
    def is_server_error(self) -> bool:
        """Tell whether the server failed: whatever is asked, that is a bug of Hearth."""
        return self.result is not Result.PASSED and bool(_SERVER_ERROR.search(self.text))


def read_junit(text: str) -> list[Outcome]:
    """Return the outcomes of pytest's JUnit XML.

    Raises:
        ValueError: it is no such file; pytest was ended while it wrote.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"pytest left no whole report: {error}") from error
    return [_read_case(case) for case in root.iter("testcase")]


def read_summary(text: str) -> list[Outcome]:
    """Return the outcomes of a program's last part, in which each check has its line."""
    found: dict[str, Outcome] = {}
    for line in text.splitlines():
        if match := _CHECK_FIRST.match(line):
            name, word, why = match[1], match[2], match[3]
        elif match := _RESULT_FIRST.match(line):
            name, word, why = match[2].strip(), match[1], ""
        else:
            continue
        found[name] = Outcome(name, _RESULTS[word], why[:TEXT_CHARS_MAX])
    return list(found.values())


def read_exit(name: str, status: int, text: str) -> list[Outcome]:
    """Return the one outcome of a program that is one check."""
    if status == 0:
        return [Outcome(name, Result.PASSED)]
    return [Outcome(name, Result.FAILED, text[-TEXT_CHARS_MAX:])]


_RESULTS: Final = {"PASS": Result.PASSED, "FAIL": Result.FAILED, "SKIP": Result.SKIPPED}


def _read_case(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname', '')}::{case.get('name', '')}"
    for kind, result in (
        ("failure", Result.FAILED),
        ("error", Result.FAILED),
        ("skipped", Result.SKIPPED),
    ):
        found = case.find(kind)
        if found is not None:
            text = f"{found.get('message') or ''}\n{found.text or ''}"
            return Outcome(name, result, text[:TEXT_CHARS_MAX])
    return Outcome(name, Result.PASSED)
