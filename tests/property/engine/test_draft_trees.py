"""Drafts with branches change no token that is said and none that is kept."""

import functools
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from hearth.shared.settings_from_env import load_settings
from hearth.shared.wire_messages import Sampling
from hearth.worker.draft.draft import Drafter
from hearth.worker.engine.decoder import Decoder, Sequence
from hearth.worker.engine.sampler import make_token_choice
from hearth.worker.engine.tree_forward import TreeForward, make_tree_forward
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.rewind import RewindPoint
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.models.oracle_drafter import TreeOracle

NAMES = ("qwen3", "llama", "qwen3_moe", "glm4_moe_lite")  # whose layers keep rows only
SETTINGS = load_settings({}, None)
TOKENS = 40
LENGTH = 70  # of the prompt
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, repetition_penalty=1.0),
    "the server's default": Sampling(seed=11),
    "hot, with penalties": Sampling(
        temperature=0.9, seed=5, presence_penalty=0.4, frequency_penalty=0.2, top_k=40, top_p=0.9
    ),
}
PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(LENGTH)]
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@functools.cache
def model(name: str) -> Any:
    return load(str(fixture_dir(name)))[0]


@functools.cache
def tree_forward(name: str) -> TreeForward:
    with mx.stream(generation_stream):
        forward = make_tree_forward(model(name), lambda: make_prompt_cache(model(name)))
    assert forward is not None
    return forward


def decoder_of(name: str, sampling: str, drafter: Drafter | None, merges: bool = False) -> Decoder:
    """Return a decoder that has read the prompt for "x"."""
    decoder = Decoder(model(name), generation_stream, merges, tree_forward(name))
    assert decoder.takes_trees
    decoder.add(sequence(name, sampling, drafter))
    return decoder


def sequence(name: str, sampling: str, drafter: Drafter | None) -> Sequence:
    cache = make_prompt_cache(model(name))
    with mx.stream(generation_stream):
        model(name)(mx.array(PROMPT[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    return Sequence(
        key="x",
        cache=cache,
        tokens=PROMPT[:-1],
        tail=PROMPT[-1:],
        choice=make_token_choice(SAMPLINGS[sampling], SETTINGS, 4000, LENGTH),
        tokens_max=TOKENS,
        drafter=drafter,
        before_draft=lambda _rows, draft_rows: draft_rows,
        rewind_point=RewindPoint,
    )


@functools.cache
def plain(name: str, sampling: str) -> list[int]:
    """Return what is said without drafts."""
    decoder = decoder_of(name, sampling, None)
    return [decoder.step()[0].token_id for _ in range(TOKENS)]


def said_by(decoder: Decoder) -> list[int]:
    said: list[int] = []
    while len(said) < TOKENS:
        said += [sampled.token_id for sampled in decoder.step()]
    return said


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_trees_that_hold_the_answer_anywhere_give_the_tokens_of_plain_decoding(
    name: str, sampling: str
) -> None:
    truth = plain(name, sampling)

    @settings(max_examples=8)
    @given(lies=st.sampled_from([0.0, 0.3, 1.0]), lengths=LENGTHS, seed=st.integers(0, 999))
    def holds(lies: float, lengths: list[int], seed: int) -> None:
        drafter = TreeOracle(truth, lies, lengths, seed)
        assert said_by(decoder_of(name, sampling, drafter)) == truth
        assert drafter.taken == truth

    holds()
    drafter = TreeOracle(truth)
    assert said_by(decoder_of(name, sampling, drafter)) == truth
    assert drafter.branched > 3 and drafter.off_the_front > 3  # or nothing was shown
    assert drafter.forwards < 0.7 * TOKENS


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
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
    returned = 0
    while returned < said:
        returned += len(decoder.step())
    left = decoder.remove("x", said)
    assert left is not None
    assert left.tokens == [*PROMPT, *truth[:said]]
    assert LayerMap(left.cache).depth(left.cache) == len(left.tokens)
    with mx.stream(generation_stream):
        logits = model(name)(mx.array([truth[said : said + 1]]), cache=left.cache)[0, -1]
        expected = logits_behind(name, said + 1)
    assert mx.allclose(logits, expected, atol=1e-3).item()


@functools.cache
def logits_behind(name: str, said: int) -> mx.array:
    """Return the logits behind so many tokens of the plain answer, each fed by itself."""
    cache = make_prompt_cache(model(name))
    model(name)(mx.array(PROMPT)[None], cache=cache)
    for token in plain(name, "greedy")[:said]:
        logits = model(name)(mx.array([[token]]), cache=cache)[0, -1]
    mx.eval(logits)
    return logits


@settings(max_examples=8)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_sequence_that_drafts_trees_may_join_a_batch_and_leave_it_between_any_two_steps(
    moves: list[int], seed: int
) -> None:
    """Another one comes after so many steps, stays for as many, and goes."""
    truth = plain("qwen3", "greedy")
    decoder = decoder_of("qwen3", "greedy", TreeOracle(truth, 0.2, (3, 7), seed), merges=True)
    said: list[int] = []

    def steps(count: int) -> None:
        for _ in range(count):
            if len(said) < TOKENS:
                said.extend(s.token_id for s in decoder.step() if s.key == "x")

    for number, count in enumerate(moves):
        steps(count)
        guest = sequence("qwen3", "greedy", None)
        guest.key = f"guest {number}"
        decoder.add(guest)
        steps(count + 1)
        decoder.remove(guest.key)
    steps(TOKENS)
    assert said == truth
