"""Drafts, right or wrong, of any length, change no token that is said and none that is kept."""

import functools

import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.utils import load

from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir
from tests.helpers.models.by_day import by_day
from tests.helpers.models.drafted_answers import DraftedAnswers
from tests.helpers.models.drafted_decoding import SAMPLINGS, any_prompt
from tests.helpers.models.oracle_drafter import OracleDrafter

TOKENS = 30
PROMPTS = {"short": 9, "past a window": 150}  # the fixtures' windows are of 128 tokens
# How often an oracle lies: each sampling takes as long again.
LIES = {
    "greedy": (0.0, 0.25, 1.0),
    "the server's default": (0.0, 0.25, 1.0),
    "hot, with penalties": (0.25,),
}


@functools.cache
def answers(name: str, length: int) -> DraftedAnswers:
    return DraftedAnswers(load(str(fixture_dir(name)))[0], any_prompt(length), TOKENS)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", by_day(TEXT_NAMES))
def test_whatever_an_oracle_drafts_the_tokens_are_those_of_plain_decoding(
    name: str, sampling: str
) -> None:
    for length in PROMPTS.values():
        of = answers(name, length)
        truth = of.plain(sampling)
        for lies in LIES[sampling]:
            drafter = OracleDrafter(truth, lies, (4, 0, 7, 1))
            assert of.drafted(sampling, drafter) == truth, (length, lies)
            assert drafter.taken == truth
            assert bool(drafter.accepted) == (lies < 1.0)


def test_right_drafts_save_forwards_and_wrong_ones_cost_rows_but_no_forwards() -> None:
    of = answers("qwen3_5", 9)
    right, wrong = (OracleDrafter(of.plain("greedy"), lies) for lies in (0.0, 1.0))
    for drafter in (right, wrong):
        of.drafted("greedy", drafter)
    assert right.forwards <= TOKENS / 5 + 1
    assert wrong.forwards <= TOKENS
    assert wrong.rows > TOKENS


@pytest.mark.parametrize(
    "name", by_day(["qwen3", "gpt_oss", "qwen3_5", "falcon_h1", "deepseek_v32"])
)
@settings(max_examples=12)
@given(
    said=st.integers(1, TOKENS - 1),
    lies=st.sampled_from([0.0, 0.25, 1.0]),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    length=st.sampled_from(sorted(PROMPTS.values())),
    seed=st.integers(0, 99),
)
def test_an_answer_that_ends_anywhere_in_a_draft_leaves_what_was_said_and_no_more(
    name: str, said: int, lies: float, lengths: list[int], length: int, seed: int
) -> None:
    of = answers(name, length)
    of.assert_left(OracleDrafter(of.plain("greedy"), lies, lengths, seed), said)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_5"])
@settings(max_examples=10)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=5), lies=st.sampled_from([0.0, 0.4]))
def test_a_sequence_that_drafts_may_join_a_batch_and_leave_it_between_any_two_steps(
    name: str, moves: list[int], lies: float
) -> None:
    of = answers(name, 9)
    truth = of.plain("greedy")
    assert of.said_beside_guests(OracleDrafter(truth, lies, (3, 7)), moves) == truth
