"""A failure is excused by a rule that fits it and by nothing else, and never the server's own."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from scripts.nightly.known_failures import Cause, Rule, judge, load_rules
from scripts.nightly.outcomes import Outcome, Result
from scripts.nightly.suites import SUITES

REFUSED = Rule("a", re.compile(r"t\d"), re.compile("400"), Cause.REFUSED, "nonsense")
OF_POCKET = Rule("a", re.compile("m"), re.compile(""), Cause.MODEL, "small")
RULES = (REFUSED, OF_POCKET)


def failed(test: str, text: str) -> Outcome:
    return Outcome(test, Result.FAILED, text)


def test_a_rule_excuses_what_fits_it_and_nothing_else() -> None:
    others = [failed("t1", "Error code: 404"), failed("t12", "400"), failed("x", "400")]

    judged = judge("a", [failed("t1", "Error code: 400"), *others], RULES, is_pocket=True)

    assert judged.known == {"nonsense": 1}
    assert judged.unknown == others
    assert not judged.is_good
    assert judge("b", [failed("t1", "400")], RULES, is_pocket=True).unknown


def test_no_rule_excuses_a_failing_server() -> None:
    every = Rule("a", re.compile(".*"), re.compile(""), Cause.TEST, "all")
    outcome = failed("t1", "openai.InternalServerError: Error code: 500")

    assert judge("a", [outcome], [every], is_pocket=True).unknown == [outcome]


def test_what_only_pocket_cannot_do_is_excused_for_pocket_alone() -> None:
    outcome = failed("m", "no tool call")

    assert judge("a", [outcome], RULES, is_pocket=True).is_good
    assert not judge("a", [outcome], RULES, is_pocket=False).is_good


def test_a_skip_needs_a_reason_too() -> None:
    skipped = Outcome("x", Result.SKIPPED, "no docker")

    assert judge("a", [skipped], RULES, is_pocket=True).unknown == [skipped]


def test_a_listed_test_that_passes_is_told_and_is_no_failure() -> None:
    judged = judge("a", [Outcome("t1", Result.PASSED)], RULES, is_pocket=True)

    assert judged.listed_but_passed == ["t1"]
    assert judged.is_good


def test_a_suite_in_which_nothing_ran_is_not_good() -> None:
    assert judge("a", [], RULES, is_pocket=True).error


@given(
    st.lists(
        st.builds(
            Outcome,
            st.sampled_from(("t1", "m", "x")),
            st.sampled_from(Result),
            st.sampled_from(("", "400", "Error code: 500")),
        ),
        min_size=1,
    ),
    st.booleans(),
)
def test_each_outcome_is_counted_once(outcomes: list[Outcome], is_pocket: bool) -> None:
    judged = judge("a", outcomes, RULES, is_pocket=is_pocket)

    counted = judged.passed + sum(judged.known.values()) + len(judged.unknown)
    assert counted == len(outcomes)
    assert all(outcome.result is not Result.PASSED for outcome in judged.unknown)


def test_the_list_names_suites_that_are_run_and_says_why() -> None:
    rules = load_rules()

    names = {suite.name for suite in SUITES}
    assert rules
    assert len(names) == len(SUITES)
    for rule in rules:
        assert rule.suite in names
        assert len(rule.why) > 20, "a reason is a sentence"
        assert not rule.tests.fullmatch(""), "a rule names tests"
        assert rule.tests.pattern != ".*"


def test_a_wrong_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"suite": "a"}]))

    with pytest.raises(ValueError, match="a rule has suite"):
        load_rules(path)
