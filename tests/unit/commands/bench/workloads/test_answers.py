"""Answers are told apart by digests; those that a cache helped with are not called cold."""

import asyncio

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.server_lives import answers
from hearth.commands.replay.traces import Captured
from tests.helpers.bench.played_visits import Played, answered, made_visit, refused


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played().put_in(monkeypatch, answers)
    made.answer = lambda row: answered(f"said to {len(str(row.body))}")
    made.found = {"read_tokens": 1e6, "wall_s": 1.0}
    return made


def test_warm_and_cold_answers_to_the_same_prompts_have_the_same_digests(played: Played) -> None:
    warm = asyncio.run(answers.run_warm(made_visit()))
    cold = asyncio.run(answers.run_cold(made_visit()))
    assert warm.digests == cold.digests and len(set(warm.digests)) > 1
    assert (warm.errors, cold.errors) == ((), ())
    assert "read_tokens" not in cold.values  # verified drafts are counted in it


def test_a_session_that_nobody_has_read_is_read_first(played: Played) -> None:
    visit = made_visit()
    asyncio.run(answers.run_warm(visit))
    assert played.tokens_max == [1, answers.ANSWER_TOKENS]
    assert played.rows[0] == played.rows[1]
    visit.kept[answers.LINEAR] = True
    asyncio.run(answers.run_warm(visit))
    assert played.tokens_max == [1, answers.ANSWER_TOKENS, answers.ANSWER_TOKENS]


def test_an_answer_whose_prompt_came_from_a_cache_is_not_called_cold(played: Played) -> None:
    seen: list[Captured] = []

    def second_cached(row: Captured) -> object:
        seen.append(row)
        return answered("a", 100, 50 if len(seen) == 2 else 100)

    played.answer = second_cached  # type: ignore[assignment]
    cold = asyncio.run(answers.run_cold(made_visit()))
    assert [bool(each) for each in cold.digests[:3]] == [True, False, True]
    assert cold.errors == (answers.NOT_COLD,)


def test_no_answer_is_cold_where_the_meter_saw_less_than_the_prompts() -> None:
    rows = [answered("a"), answered("b")]
    assert all(answers.cold_digests(rows, 197))
    assert not any(answers.cold_digests(rows, 190))
    assert all(answers.cold_digests(rows, None))  # not metered: the server is believed


def test_a_failed_request_has_no_digest_but_its_place(played: Played) -> None:
    rows = [refused(), answered("")]
    first, second = answers.cold_digests(rows, None)
    assert first == answers.NO_DIGEST != second
    played.answer = lambda _: refused()
    cold = asyncio.run(answers.run_cold(made_visit()))
    assert answers.NOT_COLD not in cold.errors and cold.values["failed"] == len(cold.digests)


@given(st.text(), st.text())
def test_digests_tell_answers_apart_and_nothing_of_them(one: str, other: str) -> None:
    told = answers.digest(answered(one)), answers.digest(answered(other))
    assert (told[0] == told[1]) == (one == other)
    assert all(len(each) == answers.DIGEST_CHARS for each in told)


def test_what_was_thought_is_not_what_was_said() -> None:
    thought, said = answered("b"), answered("ab")
    thought.outcome.reading.reasoning.append("a")
    assert answers.digest(thought) != answers.digest(said)
