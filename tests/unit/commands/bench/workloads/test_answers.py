"""Answers are told apart by digests; those that a cache helped with are not called cold."""

from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.server_lives import answers
from hearth.commands.replay.player import Row
from hearth.commands.stream_client import Outcome, Reading, Tokens


def answered(text: str = "", thought: str = "") -> Row:
    """Return how an answered request of 100 tokens went, of which none was kept."""
    reading = Reading(text=[text], reasoning=[thought], is_complete=True)
    outcome = Outcome(200, Tokens(100, 0, 100, 1, ""), 0.1, 0.2, "", reading)
    return Row(0, "t", "chat", outcome, (1, 2, 3, 4))


def test_no_answer_is_cold_where_the_meter_saw_less_than_the_prompts() -> None:
    rows = [answered("a"), answered("b")]
    assert all(answers.cold_digests(rows, 197))
    assert not any(answers.cold_digests(rows, 190))
    assert all(answers.cold_digests(rows, None)), "not metered: the server is believed"


def test_a_failed_request_has_no_digest_but_its_place() -> None:
    refused = Row(0, "t", "chat", Outcome.refused(503, "full"), None)
    first, second = answers.cold_digests([refused, answered()], None)
    assert first == answers.NO_DIGEST != second


@given(st.text(), st.text())
def test_digests_tell_answers_apart_and_nothing_of_them(one: str, other: str) -> None:
    told = answers.digest(answered(one)), answers.digest(answered(other))
    assert (told[0] == told[1]) == (one == other)
    assert all(len(each) == answers.DIGEST_CHARS for each in told)
    assert answers.digest(answered("b", "a")) != answers.digest(answered("ab")), "it was thought"
