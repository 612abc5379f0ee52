"""Drafts, right or wrong, of any length, change no token that is said and none that is kept."""

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
from hearth.worker.engine.decode.decoder import Decoder, Sequence
from hearth.worker.engine.decode.sampler import TokenChoice, make_token_choice
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.rewind import RewindPoint, can_rewind
from scripts.fixtures.fixture_cache import TEXT_NAMES, fixture_dir
from tests.helpers.models.oracle_drafter import OracleDrafter

SETTINGS = load_settings({}, None)  # their sampling is the servers' default
TOKENS = 30
PROMPTS = {"short": 9, "past a window": 150}  # the fixtures' windows are of 128 tokens
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, repetition_penalty=1.0),
    "the server's default": Sampling(seed=11),
    "hot, with penalties": Sampling(
        temperature=0.9, seed=5, presence_penalty=0.4, frequency_penalty=0.2, top_k=40, top_p=0.9
    ),
}
# How often an oracle lies: each sampling takes as long again.
LIES = {
    "greedy": (0.0, 0.25, 1.0),
    "the server's default": (0.0, 0.25, 1.0),
    "hot, with penalties": (0.25,),
}


@functools.cache
def model(name: str) -> Any:
    return load(str(fixture_dir(name)))[0]


def prompt(length: int) -> list[int]:
    return [(i * 7919 + 13) % 2900 + 50 for i in range(length)]


def choice_of(sampling: str, prompt_length: int) -> TokenChoice:
    return make_token_choice(SAMPLINGS[sampling], SETTINGS, 4000, prompt_length)


def sequence(name: str, ids: list[int], sampling: str, drafter: OracleDrafter | None) -> Sequence:
    cache = make_prompt_cache(model(name))
    with mx.stream(generation_stream):
        model(name)(mx.array(ids[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    assert can_rewind(cache)
    return Sequence(
        key="x",
        cache=cache,
        tokens=ids[:-1],
        tail=ids[-1:],
        choice=choice_of(sampling, len(ids)),
        tokens_max=TOKENS,
        drafter=drafter,
        before_draft=lambda _rows, draft_rows: draft_rows,
        rewind_point=RewindPoint,
    )


@functools.cache
def plain(name: str, length: int, sampling: str) -> list[int]:
    """Return what is said without drafts."""
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, prompt(length), sampling, None))
    return [decoder.step()[0].token_id for _ in range(TOKENS)]


def drafted(name: str, length: int, sampling: str, drafter: OracleDrafter) -> list[int]:
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, prompt(length), sampling, drafter))
    said: list[int] = []
    while len(said) < TOKENS:
        said += [sampled.token_id for sampled in decoder.step()]
    return said


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
    truth, ids = plain(name, length, "greedy"), prompt(length)
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, ids, "greedy", OracleDrafter(truth, lies, lengths, seed)))
    returned = 0
    while returned < said:
        returned += len(decoder.step())
    left = decoder.remove("x", said)
    assert left is not None
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
    model(name)(mx.array(prompt(length))[None], cache=cache)
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
    """Another one comes after so many steps, stays for as many, and goes."""
    truth = plain(name, 9, "greedy")
    decoder = Decoder(model(name), generation_stream, is_mergeable=True)
    decoder.add(sequence(name, prompt(9), "greedy", OracleDrafter(truth, lies, (3, 7))))
    said: list[int] = []

    def steps(count: int) -> None:
        for _ in range(count):
            if len(said) < TOKENS:
                said.extend(s.token_id for s in decoder.step() if s.key == "x")

    for number, count in enumerate(moves):
        steps(count)
        guest = sequence(name, prompt(9), "greedy", None)
        guest.key = f"guest {number}"
        decoder.add(guest)
        steps(count + 1)
        decoder.remove(guest.key)
    steps(TOKENS)
    assert said == truth
