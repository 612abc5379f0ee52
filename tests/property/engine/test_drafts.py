"""Drafts, right or wrong, of any length, change no token that is said and none that is kept."""

import functools
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.rewind import can_rewind
from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir
from tests.helpers.models.drafted_decoding import (
    SAMPLINGS,
    any_prompt,
    drafted_sequence,
    ended_amid_a_draft,
    said_beside_guests,
    said_by,
)
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
def model(name: str) -> Any:
    return load(str(fixture_dir(name)))[0]


def sequence(
    name: str, ids: list[int], sampling: str, drafter: OracleDrafter | None, key: str = "x"
) -> Sequence:
    cache = make_prompt_cache(model(name))
    with mx.stream(generation_stream):
        model(name)(mx.array(ids[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    assert can_rewind(cache)
    return drafted_sequence(cache, ids, sampling, drafter, TOKENS, key=key)


@functools.cache
def plain(name: str, length: int, sampling: str) -> list[int]:
    """Return what is said without drafts."""
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, any_prompt(length), sampling, None))
    return [decoder.step()[0].token_id for _ in range(TOKENS)]


def drafted(name: str, length: int, sampling: str, drafter: OracleDrafter) -> list[int]:
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, any_prompt(length), sampling, drafter))
    return said_by(decoder, TOKENS)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", TEXT_NAMES)
def test_whatever_an_oracle_drafts_the_tokens_are_those_of_plain_decoding(
    name: str, sampling: str
) -> None:
    for length in PROMPTS.values():
        truth = plain(name, length, sampling)
        for lies in LIES[sampling]:
            drafter = OracleDrafter(truth, lies, (4, 0, 7, 1))
            assert drafted(name, length, sampling, drafter) == truth, (length, lies)
            assert drafter.taken == truth
            assert bool(drafter.accepted) == (lies < 1.0)


def test_right_drafts_save_forwards_and_wrong_ones_cost_rows_but_no_forwards() -> None:
    truth = plain("qwen3_5", 9, "greedy")
    right, wrong = OracleDrafter(truth), OracleDrafter(truth, lies=1.0)
    drafted("qwen3_5", 9, "greedy", right)
    drafted("qwen3_5", 9, "greedy", wrong)
    assert right.forwards <= TOKENS / 5 + 1
    assert wrong.forwards <= TOKENS
    assert wrong.rows > TOKENS


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_5", "falcon_h1", "deepseek_v32"])
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
    truth, ids = plain(name, length, "greedy"), any_prompt(length)
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, ids, "greedy", OracleDrafter(truth, lies, lengths, seed)))
    left = ended_amid_a_draft(decoder, said)
    assert left.tokens == [*ids, *truth[:said]]
    assert depth_of(left.cache) in (None, len(left.tokens))
    with mx.stream(generation_stream):
        logits = model(name)(mx.array([truth[said : said + 1]]), cache=left.cache)[0, -1]
        expected = logits_behind(name, length, said + 1)
    assert mx.allclose(logits, expected, atol=1e-3).item()


def depth_of(cache: list[Any]) -> int | None:
    return LayerMap(cache).depth(cache)


@functools.cache
def logits_behind(name: str, length: int, said: int) -> mx.array:
    """Return the logits behind so many tokens of the plain answer, each fed by itself."""
    cache = make_prompt_cache(model(name))
    model(name)(mx.array(any_prompt(length))[None], cache=cache)
    for token in plain(name, length, "greedy")[:said]:
        logits = model(name)(mx.array([[token]]), cache=cache)[0, -1]
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_5"])
@settings(max_examples=10)
@given(moves=st.lists(st.integers(0, 4), min_size=1, max_size=5), lies=st.sampled_from([0.0, 0.4]))
def test_a_sequence_that_drafts_may_join_a_batch_and_leave_it_between_any_two_steps(
    name: str, moves: list[int], lies: float
) -> None:
    truth = plain(name, 9, "greedy")
    decoder = Decoder(model(name), generation_stream, is_mergeable=True)
    decoder.add(sequence(name, any_prompt(9), "greedy", OracleDrafter(truth, lies, (3, 7))))

    def guest(key: str) -> Sequence:
        return sequence(name, any_prompt(9), "greedy", None, key)

    assert said_beside_guests(decoder, moves, guest, TOKENS) == truth
