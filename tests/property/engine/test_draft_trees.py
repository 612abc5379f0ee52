"""Drafts with branches change no token that is said and none that is kept."""

import functools
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from hearth.worker.engine.decode.tree_forward import make_tree_forward
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.by_day import by_day
from tests.helpers.models.drafted_answers import DraftedAnswers
from tests.helpers.models.drafted_decoding import SAMPLINGS, any_prompt
from tests.helpers.models.oracle_drafter import TreeOracle

# Whose layers keep rows only; the last one is given positions, as if behind an image.
NAMES = ("qwen3", "llama", "qwen3_moe", "glm4_moe_lite", "qwen3_vl")
SHIFTS = {"qwen3_vl": -9}
DAY = ("qwen3", "qwen3_vl")
TOKENS = 40
PROMPT = any_prompt(70)
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@functools.cache
def answers(name: str) -> DraftedAnswers:
    model = loaded(name).model
    with mx.stream(generation_stream):
        trees = make_tree_forward(model, lambda: make_prompt_cache(model))
    assert trees is not None
    shift = SHIFTS.get(name, 0)
    return DraftedAnswers(model, PROMPT, TOKENS, shift=shift, tree_forward=trees)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", by_day(NAMES, DAY))
def test_trees_that_hold_the_answer_anywhere_give_the_tokens_of_plain_decoding(
    name: str, sampling: str
) -> None:
    of = answers(name)
    truth = of.plain(sampling)

    @settings(max_examples=6)
    @given(lies=st.sampled_from([0.0, 0.3, 1.0]), lengths=LENGTHS, seed=st.integers(0, 999))
    def holds(lies: float, lengths: list[int], seed: int) -> None:
        drafter = TreeOracle(truth, lies, lengths, seed)
        assert of.drafted(sampling, drafter) == drafter.taken == truth

    holds()
    drafter = TreeOracle(truth)
    assert of.drafted(sampling, drafter) == truth
    assert drafter.branched > 3 and drafter.off_the_front > 3  # or nothing was shown
    assert drafter.forwards < 0.7 * TOKENS


@pytest.mark.parametrize("name", by_day(NAMES, DAY))
@settings(max_examples=10)
@given(
    said=st.integers(1, TOKENS - 1),
    lies=st.sampled_from([0.0, 0.3]),
    lengths=LENGTHS,
    seed=st.integers(0, 999),
)
def test_an_answer_that_ends_anywhere_in_a_tree_leaves_what_was_said_and_no_more(
    name: str, said: int, lies: float, lengths: list[int], seed: int
) -> None:
    of = answers(name)
    of.assert_left(TreeOracle(of.plain("greedy"), lies, lengths, seed), said)


@settings(max_examples=8)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_sequence_that_drafts_trees_may_join_a_batch_and_leave_it_between_any_two_steps(
    moves: list[int], seed: int
) -> None:
    of = answers("qwen3")
    truth = of.plain("greedy")
    assert of.said_beside_guests(TreeOracle(truth, 0.2, (3, 7), seed), moves) == truth


class Guide:
    """A guide that lets everything pass."""

    def process(self, _context: mx.array, logits: mx.array) -> mx.array:
        return logits

    def take(self, tokens: list[int]) -> None:
        self.taken = tokens


def test_with_a_guide_a_draft_with_branches_is_a_mistake_of_the_drafter() -> None:
    of = answers("qwen3")
    decoder = of.decoder()
    guided = of.sequence("greedy", TreeOracle(of.plain("greedy"), branching=1.0))
    guided.choice = replace(guided.choice, guide=Guide())  # type: ignore[arg-type]
    decoder.add(guided)
    with pytest.raises(AssertionError, match="a guide follows one path"):
        for _ in range(TOKENS):
            decoder.step()


def test_a_model_without_trees_is_given_none() -> None:
    of = replace(answers("qwen3"), tree_forward=None)
    decoder = of.decoder()
    assert not decoder.takes_trees
    decoder.add(of.sequence("greedy", TreeOracle(of.plain("greedy"), branching=1.0)))
    with pytest.raises(AssertionError, match="this model's drafts have no branches"):
        for _ in range(TOKENS):
            decoder.step()
