"""Ties are few, or the session fails."""

from types import SimpleNamespace

import pytest

from tests.helpers.tie_count import NAME, TieCount


@pytest.mark.parametrize(
    ("tokens", "ties", "fails"),
    [(10, 1, False), (10, 2, True), (1_000, 4, False), (1_000, 5, True)],
)
def test_a_session_fails_for_more_ties_than_one_and_three_in_a_thousand_tokens(
    tokens: int, ties: int, fails: bool
) -> None:
    count, session = TieCount(), SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    told = [(NAME, (5, 2, tokens, ["token 3 is 1 and not 2"] * ties))]
    for when in ("setup", "call", "teardown"):  # pytest gives a test's properties to all three
        report = SimpleNamespace(when=when, nodeid="test_of", user_properties=told)
        count.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    count.pytest_sessionfinish(session)
    assert (count.exact, count.answers, count.tokens) == (5, 2, tokens)
    assert (session.exitstatus == pytest.ExitCode.TESTS_FAILED) is fails
