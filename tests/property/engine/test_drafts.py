"""Drafts, chains or trees, right or wrong, change no token that is said and none that is kept."""

import functools
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from hearth.worker.engine.lora.lora_adapter import applied
from hearth.worker.engine.model_trials import make_tree_forward
from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir
from scripts.harness.lora_files import adapted, upstream_adapted
from scripts.harness.socketless_worker import loaded
from tests.helpers.by_day import by_day
from tests.helpers.models.drafted_answers import DraftedAnswers
from tests.helpers.models.drafted_decoding import SAMPLINGS, any_prompt, said_by
from tests.helpers.models.oracle_drafter import OracleDrafter, TreeOracle

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


# Whose layers keep rows only; the last one is given positions, as if behind an image.
NAMES = ("qwen3", "llama", "qwen3_moe", "glm4_moe_lite", "qwen3_vl")
SHIFTS = {"qwen3_vl": -9}
DAY = ("qwen3", "qwen3_vl")
TREE_TOKENS = 40
PROMPT = any_prompt(70)
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@functools.cache
def tree_answers(name: str) -> DraftedAnswers:
    model = loaded(name).model
    with mx.stream(generation_stream):
        trees = make_tree_forward(model, lambda: make_prompt_cache(model))
    assert trees is not None
    shift = SHIFTS.get(name, 0)
    return DraftedAnswers(model, PROMPT, TREE_TOKENS, shift=shift, tree_forward=trees)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", by_day(NAMES, DAY))
def test_trees_that_hold_the_answer_anywhere_give_the_tokens_of_plain_decoding(
    name: str, sampling: str
) -> None:
    of = tree_answers(name)
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
    assert drafter.forwards < 0.7 * TREE_TOKENS


@pytest.mark.parametrize("name", by_day(NAMES, DAY))
@settings(max_examples=10)
@given(
    said=st.integers(1, TREE_TOKENS - 1),
    lies=st.sampled_from([0.0, 0.3]),
    lengths=LENGTHS,
    seed=st.integers(0, 999),
)
def test_an_answer_that_ends_anywhere_in_a_tree_leaves_what_was_said_and_no_more(
    name: str, said: int, lies: float, lengths: list[int], seed: int
) -> None:
    of = tree_answers(name)
    of.assert_left(TreeOracle(of.plain("greedy"), lies, lengths, seed), said)


@settings(max_examples=8)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_sequence_that_drafts_trees_may_join_a_batch_and_leave_it_between_any_two_steps(
    moves: list[int], seed: int
) -> None:
    of = tree_answers("qwen3")
    truth = of.plain("greedy")
    assert of.said_beside_guests(TreeOracle(truth, 0.2, (3, 7), seed), moves) == truth


def test_branches_are_verified_by_the_adapter_of_the_request() -> None:
    model = adapted("qwen3")
    adapter = model.adapters.of("one")
    of = DraftedAnswers(model.model, PROMPT, TREE_TOKENS)
    of.tree_forward = make_tree_forward(model.model, lambda: make_prompt_cache(model.model))
    truth = replace(of, model=upstream_adapted("qwen3", "one").model, tree_forward=None)
    drafter = TreeOracle(truth.plain("greedy"))
    with applied(adapter):
        drafted = of.sequence("greedy", drafter)
    decoder = of.decoder()
    decoder.add(replace(drafted, adapter=adapter))
    assert said_by(decoder, TREE_TOKENS) == truth.plain("greedy")
    assert drafter.branched > 3


class Guide:
    """A guide that lets everything pass."""

    def process(self, _context: mx.array, logits: mx.array) -> mx.array:
        return logits

    def take(self, tokens: list[int]) -> None:
        self.taken = tokens


def test_with_a_guide_a_draft_with_branches_is_a_mistake_of_the_drafter() -> None:
    of = tree_answers("qwen3")
    decoder = of.decoder()
    guided = of.sequence("greedy", TreeOracle(of.plain("greedy"), branching=1.0))
    guided.sampling = replace(guided.sampling, guide=Guide())  # type: ignore[arg-type]
    decoder.add(guided)
    with pytest.raises(AssertionError, match="a guide follows one path"):
        for _ in range(TREE_TOKENS):
            decoder.step()


def test_a_model_without_trees_is_given_none() -> None:
    of = replace(tree_answers("qwen3"), tree_forward=None)
    decoder = of.decoder()
    assert not decoder.takes_trees
    decoder.add(of.sequence("greedy", TreeOracle(of.plain("greedy"), branching=1.0)))
    with pytest.raises(AssertionError, match="this model's drafts have no branches"):
        for _ in range(TREE_TOKENS):
            decoder.step()
