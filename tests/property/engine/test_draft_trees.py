"""Drafts with branches change no token that is said and none that is kept."""

import functools
from collections.abc import Sequence as Indexes
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.speculative.ddtree import build_ddtree

from hearth.worker.draft.draft import Draft, Drafter, chain
from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.tree_forward import TreeForward, make_tree_forward
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.drafted_decoding import (
    SAMPLINGS,
    any_prompt,
    drafted_sequence,
    ended_amid_a_draft,
    said_beside_guests,
    said_by,
)
from tests.helpers.models.oracle_drafter import OracleDrafter, TreeOracle

# Whose layers keep rows only; the last one is given positions, as if behind an image.
NAMES = ("qwen3", "llama", "qwen3_moe", "glm4_moe_lite", "qwen3_vl")
SHIFTS = {"qwen3_vl": -9}
TOKENS = 40
LENGTH = 70  # of the prompt
VOCABULARY = 3072  # of the fixtures
PROMPT = any_prompt(LENGTH)
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@functools.cache
def model(name: str) -> Any:
    return loaded(name).model


def forward(name: str, ids: list[int], cache: list[Any]) -> mx.array:
    """Return the logits (n, vocabulary) of a plain forward."""
    arguments = {"shift": SHIFTS[name]} if name in SHIFTS else {}
    logits: mx.array = model(name)(mx.array([ids]), cache=cache, **arguments)[0]
    return logits


@functools.cache
def tree_forward(name: str) -> TreeForward:
    with mx.stream(generation_stream):
        made = make_tree_forward(model(name), lambda: make_prompt_cache(model(name)))
    assert made is not None
    return made


def decoder_of(name: str, sampling: str, drafter: Drafter | None, merges: bool = False) -> Decoder:
    """Return a decoder that has read the prompt for "x"."""
    decoder = Decoder(model(name), generation_stream, merges, tree_forward(name))
    assert decoder.takes_trees
    decoder.add(sequence(name, sampling, drafter))
    return decoder


def sequence(name: str, sampling: str, drafter: Drafter | None, key: str = "x") -> Sequence:
    cache = make_prompt_cache(model(name))
    with mx.stream(generation_stream):
        forward(name, PROMPT[:-1], cache)
        mx.eval([layer.state for layer in cache])
    shift = SHIFTS.get(name, 0)
    return drafted_sequence(cache, PROMPT, sampling, drafter, TOKENS, key=key, shift=shift)


@functools.cache
def plain(name: str, sampling: str) -> list[int]:
    """Return what is said without drafts."""
    decoder = decoder_of(name, sampling, None)
    return [decoder.step()[0].token_id for _ in range(TOKENS)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_trees_that_hold_the_answer_anywhere_give_the_tokens_of_plain_decoding(
    name: str, sampling: str
) -> None:
    truth = plain(name, sampling)

    @settings(max_examples=6)
    @given(lies=st.sampled_from([0.0, 0.3, 1.0]), lengths=LENGTHS, seed=st.integers(0, 999))
    def holds(lies: float, lengths: list[int], seed: int) -> None:
        drafter = TreeOracle(truth, lies, lengths, seed)
        assert said_by(decoder_of(name, sampling, drafter), TOKENS) == truth
        assert drafter.taken == truth

    holds()
    drafter = TreeOracle(truth)
    assert said_by(decoder_of(name, sampling, drafter), TOKENS) == truth
    assert drafter.branched > 3 and drafter.off_the_front > 3  # or nothing was shown
    assert drafter.forwards < 0.7 * TOKENS


@pytest.mark.parametrize("name", NAMES)
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
    truth = plain(name, "greedy")
    decoder = decoder_of(name, "greedy", TreeOracle(truth, lies, lengths, seed))
    left = ended_amid_a_draft(decoder, said)
    assert left.tokens == [*PROMPT, *truth[:said]]
    assert LayerMap(left.cache).depth(left.cache) == len(left.tokens)
    with mx.stream(generation_stream):
        logits = forward(name, truth[said : said + 1], left.cache)[-1]
        expected = logits_behind(name, said + 1)
    assert mx.allclose(logits, expected, atol=1e-3).item()


@functools.cache
def logits_behind(name: str, said: int) -> mx.array:
    """Return the logits behind so many tokens of the plain answer, each fed by itself."""
    cache = make_prompt_cache(model(name))
    forward(name, PROMPT, cache)
    for token in plain(name, "greedy")[:said]:
        logits = forward(name, [token], cache)[-1]
    mx.eval(logits)
    return logits


@settings(max_examples=8)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_sequence_that_drafts_trees_may_join_a_batch_and_leave_it_between_any_two_steps(
    moves: list[int], seed: int
) -> None:
    truth = plain("qwen3", "greedy")
    decoder = decoder_of("qwen3", "greedy", TreeOracle(truth, 0.2, (3, 7), seed), merges=True)

    def guest(key: str) -> Sequence:
        return sequence("qwen3", "greedy", None, key)

    assert said_beside_guests(decoder, moves, guest, TOKENS) == truth


class LogitsDrafter(OracleDrafter):
    """Drafts as a block of a diffusion drafter does: logits for each of the next places.

    The answer's token is the likeliest at most places, at the others the second or third. A tree
    is made of them by mlx-vlm, and the best chain is the likeliest token at each place.
    """

    def __init__(self, truth: list[int], draws_trees: bool) -> None:
        super().__init__(truth, lengths=(7,))
        self._draws_trees = draws_trees

    def _draft(self, length: int) -> Draft:
        start = len(self.taken)
        places = range(start, min(start + length, len(self._truth)))
        if not self._draws_trees:
            tokens = [int(mx.argmax(self._logits(place)).item()) for place in places]
            return chain(tokens, ["model"] * len(tokens))
        block = mx.stack([self._logits(place) for place in places])[None]
        nodes = build_ddtree(block, length, slot_offset=0)
        return Draft(
            tuple(node.token_ids[-1] for node in nodes),
            tuple(node.parent for node in nodes),
            tuple(chain([0] * len(nodes), ["model"] * len(nodes)).sources),
        )

    def _logits(self, place: int) -> mx.array:
        """Return (vocabulary,): some noise, and the truth among three that stand out."""
        draws = np.random.default_rng(place)
        logits = draws.normal(size=VOCABULARY)
        rank = draws.choice(3, p=[0.55, 0.3, 0.15])
        logits[[2990, 2991]] = 6 + np.sort(draws.random(2))[::-1] * 2
        logits[self._truth[place]] = (8.5, 6.0, 5.0)[rank]
        return mx.array(logits.astype(np.float32))

    def note(self, draft: Draft, accepted: Indexes, rows: int) -> None:
        self.accepted += len(accepted)


@pytest.mark.parametrize("sampling", ["greedy", "the server's default"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_a_tree_of_a_drafters_logits_takes_fewer_forwards_than_its_best_chain(
    name: str, sampling: str
) -> None:
    truth = plain(name, sampling)
    forwards = {}
    for draws_trees in (False, True):
        drafter = LogitsDrafter(truth, draws_trees)
        assert said_by(decoder_of(name, sampling, drafter), TOKENS) == truth
        forwards[draws_trees] = drafter.forwards
    assert forwards[True] < forwards[False]


class Guide:
    """A guide that lets everything pass."""

    def process(self, _context: mx.array, logits: mx.array) -> mx.array:
        return logits

    def take(self, tokens: list[int]) -> None:
        self.taken = tokens


def test_with_a_guide_a_draft_with_branches_is_a_mistake_of_the_drafter() -> None:
    drafter = LogitsDrafter(plain("qwen3", "greedy"), draws_trees=True)
    decoder = Decoder(model("qwen3"), generation_stream, False, tree_forward("qwen3"))
    guided = sequence("qwen3", "greedy", drafter)
    guided.choice = replace(guided.choice, guide=Guide())  # type: ignore[arg-type]
    decoder.add(guided)
    with pytest.raises(AssertionError, match="a guide follows one path"):
        decoder.step()


def test_a_model_without_trees_is_given_none() -> None:
    decoder = Decoder(model("qwen3"), generation_stream, is_mergeable=False)
    assert not decoder.takes_trees
    decoder.add(sequence("qwen3", "greedy", TreeOracle(plain("qwen3", "greedy"), branching=1.0)))
    with pytest.raises(AssertionError, match="this model's drafts have no branches"):
        for _ in range(TOKENS):
            decoder.step()
