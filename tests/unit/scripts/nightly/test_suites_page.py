"""The page says what the last run found, and is the one that the run's file makes."""

import json
import re

import pytest

from scripts.nightly.__main__ import merged
from scripts.nightly.known_failures import Cause, Rule, load_rules
from scripts.nightly.suites import SUITES
from scripts.nightly.suites_page import PAGE, RUN, page_of

RULES = (
    Rule("a", re.compile("t"), re.compile(""), Cause.REFUSED, "It asks for nonsense."),
    Rule("a", re.compile("u"), re.compile(""), Cause.OURS, "It passes meanwhile."),
)
ROW = {
    "suite": "a",
    "about": "A suite",
    "source": "owner/name 12345678",
    "passed": 1200,
    "known": {"It asks for nonsense.": 3},
    "unknown": ["x"],
    "listed_but_passed": [],
    "did_not_run": False,
    "is_good": False,
    "seconds": 12.3,
}


def test_the_page_is_the_one_of_the_last_run() -> None:
    run = json.loads(RUN.read_text())

    assert PAGE.read_text() == page_of(run, load_rules()), "run .ci/nightly --page-only"


def test_the_page_counts_what_passed_and_says_why_the_rest_did_not() -> None:
    page = page_of({"suites": [ROW]}, RULES)

    assert "Of 1,204 tests 1,200 pass; 3 fail for a reason below; 1 fail without one." in page
    assert "| a | A suite | name 12345678 | 1200 | 3 | 1 | 12 |" in page
    assert "| a | 3 | It asks for nonsense. |" in page
    assert "It passes meanwhile." not in page


def test_a_suite_that_did_not_run_is_told() -> None:
    page = page_of({"suites": [{**ROW, "did_not_run": True}]}, RULES)

    assert "did not run" in page


def test_a_run_with_a_reason_that_is_listed_no_more_makes_no_page() -> None:
    with pytest.raises(AssertionError, match="run these again"):
        page_of({"suites": [{**ROW, "known": {"Gone.": 1}}]}, RULES)


def test_suites_that_did_not_run_now_keep_their_rows() -> None:
    first, last = SUITES[0].name, SUITES[-1].name
    before = {"suites": [{"suite": last, "passed": 1}, {"suite": first, "passed": 1}]}

    whole = merged(before, {"suites": [{"suite": first, "passed": 2}]})

    assert whole["suites"] == [{"suite": first, "passed": 2}, {"suite": last, "passed": 1}]
