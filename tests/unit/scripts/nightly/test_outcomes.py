"""A suite's outcomes are read as it told them, and a failing server is known by its words."""

from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given, strategies as st

from scripts.nightly.outcomes import Outcome, Result, read_exit, read_junit, read_summary

NAMES = st.from_regex(r"[a-z0-9_]{1,12}", fullmatch=True)
ELEMENTS = {Result.FAILED: ("failure", "error"), Result.SKIPPED: ("skipped",), Result.PASSED: ()}
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), max_size=80)


@given(st.data(), st.dictionaries(NAMES, st.tuples(st.sampled_from(Result), TEXTS), max_size=6))
def test_pytests_report_is_read_test_by_test(
    data: st.DataObject, tests: dict[str, tuple[Result, str]]
) -> None:
    cases = []
    for name, (result, text) in tests.items():
        kinds = ELEMENTS[result]
        kind = data.draw(st.sampled_from(kinds)) if kinds else ""
        inner = f"<{kind} message={quoteattr(text)}></{kind}>" if kind else ""
        cases.append(f'<testcase classname="tests.a.B" name="{name}">{inner}</testcase>')
    xml = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"

    found = read_junit(xml)

    assert [(each.test, each.result) for each in found] == [
        (f"tests.a.B::{name}", result) for name, (result, _) in tests.items()
    ]
    for each, (result, text) in zip(found, tests.values(), strict=True):
        assert result is Result.PASSED or each.text.startswith(text)


def test_a_report_that_broke_off_is_an_error() -> None:
    with pytest.raises(ValueError, match="no whole report"):
        read_junit("<testsuites><testcase")


def test_both_forms_of_a_summary_are_read_and_the_last_line_of_a_check_counts() -> None:
    text = """=== Test 1 ===
FAIL: not a line of the summary
  1_plain: FAIL: first
  Round 1/5: FAIL
  1_plain: PASS
  6_structured: SKIP: no package
  FAIL  Long generation
  PASS  Rapid fire
  5/8 passed
"""
    assert read_summary(text) == [
        Outcome("1_plain", Result.PASSED),
        Outcome("6_structured", Result.SKIPPED, "no package"),
        Outcome("Long generation", Result.FAILED),
        Outcome("Rapid fire", Result.PASSED),
    ]


def test_a_program_that_is_one_check_tells_its_end() -> None:
    assert read_exit("soak", 0, "text") == [Outcome("soak", Result.PASSED)]
    assert read_exit("soak", 1, "a" * 5000 + "end")[0].text.endswith("end")


@pytest.mark.parametrize(
    "text",
    [
        "openai.InternalServerError: Error code: 500 - {}",
        "anthropic.APIStatusError: Error code: 529 - {}",
        "httpx.HTTPStatusError: Server error '503 Service Unavailable' for url",
        "requests.exceptions.HTTPError: 500 Server Error: x for url",
        "status_code: 502, model_name: pocket",
    ],
)
def test_a_failing_server_is_known_by_each_clients_words(text: str) -> None:
    assert Outcome("t", Result.FAILED, text).is_server_error
    assert Outcome("t", Result.SKIPPED, text).is_server_error
    assert not Outcome("t", Result.PASSED, text).is_server_error


@pytest.mark.parametrize("text", ["Error code: 400 - {}", "expected 500, got 12", "in 5 s"])
def test_other_failures_are_not_taken_for_the_servers(text: str) -> None:
    assert not Outcome("t", Result.FAILED, text).is_server_error
