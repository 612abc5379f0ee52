"""Sequences that join, leave and change batches at any moment say what each says alone."""

import functools
import random
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from hearth.worker.engine.decode.batch_split import ReadCost
from hearth.worker.engine.decode.decoder import Decoder, DecodingSequence
from hearth.worker.engine.decode.sampler import SamplingParams, greedy
from hearth.worker.engine.decode.trunk_attention import reach_trunks
from scripts.fixtures.fixture_cache import fixture_dir

STEPS = 12  # of an answer, at most
LENGTHS = (3, 9, 30, 90, 200)
# Every grouping comes about: all together, nobody with anybody, and those of near lengths.
COSTS = (ReadCost(), ReadCost(1, row_bytes=1), ReadCost(60, row_bytes=1))
PACKED = "qwen3, packed"
NAMES = ("qwen3", PACKED, "qwen3_5", "gpt_oss")
# How far prompts begin alike: the later ones further than the earlier.
SHARED_LENGTHS = {3: 40, 4: 40, 5: 40, 6: 70, 7: 70, 8: 70, 9: 70}
STRANGER = 9  # who may share with nobody
TRUNK_MIN = 24


@functools.cache
def model(name: str) -> Any:
    made = load(str(fixture_dir(name.split(",")[0], tiny=True)))[0]
    reach_trunks(made)
    return made


def prompt(number: int) -> list[int]:
    shared, chance = random.Random(77), random.Random(number)
    trunk = [shared.randrange(20, 3000) for _ in range(SHARED_LENGTHS.get(number, 0))]
    return trunk + [chance.randrange(20, 3000) for _ in range(LENGTHS[number % len(LENGTHS)])]


def sequence(name: str, key: str, ids: list[int]) -> DecodingSequence:
    cache = make_prompt_cache(model(name))
    if name == PACKED:
        maybe_quantize_kv_cache(cache, 0, 32, 8)
    with mx.stream(generation_stream):
        model(name)(mx.array(ids[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in cache])
    choice = SamplingParams(sampler=greedy, processors=(), top_logprobs=1)
    lineage = None if ids == prompt(STRANGER) else "of all others"
    return DecodingSequence(key, cache, ids[:-1], ids[-1:], choice, STEPS + 3, lineage=lineage)


@functools.cache
def alone(name: str, number: int) -> tuple[list[int], list[float]]:
    """Return the tokens of a prompt's answer, and how much likelier each is than the next best."""
    decoder = Decoder(model(name), generation_stream, is_mergeable=False)
    decoder.add(sequence(name, "x", prompt(number)))
    steps = [decoder.step()[0] for _ in range(STEPS + 3)]
    leads = []
    for step in steps:
        assert step.logprobs is not None
        best = mx.sort(step.logprobs.astype(mx.float32))[-2:].tolist()
        leads.append(best[1] - best[0])  # type: ignore[index]
    return [step.token_id for step in steps], leads


def is_same(name: str, number: int, said: list[int]) -> bool:
    """Whether an answer is the one alone, as far as no two tokens are nearly as likely."""
    tokens, leads = alone(name, number)
    for place, token_id in enumerate(said):
        if token_id != tokens[place]:
            return leads[place] < 0.01
    return True


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(
    moves=st.lists(
        st.one_of(st.integers(0, 9), st.just("step"), st.just("step"), st.just("leave")),
        min_size=4,
        max_size=30,
    ),
    cost=st.sampled_from(COSTS),
    shares_trunks=st.sampled_from([True, True, False]),
    is_mergeable=st.sampled_from([True, True, True, False]),
)
def test_whoever_comes_and_goes_nobody_else_says_anything_else(
    name: str, moves: list[int | str], cost: ReadCost, shares_trunks: bool, is_mergeable: bool
) -> None:
    decoder = Decoder(
        model(name), generation_stream, is_mergeable, try_trunks=lambda: shares_trunks
    )
    decoder.cost, decoder.trunk_tokens_min = cost, TRUNK_MIN
    said: dict[str, list[int]] = {}
    for turn, move in enumerate(moves):
        if isinstance(move, int):
            key = f"{move} {turn}"
            decoder.add(sequence(name, key, prompt(move)))
            said[key] = []
        elif move == "step":
            for sampled in decoder.step():
                said[sampled.request_id].append(sampled.token_id)
        leaving = [key for key in said if len(said[key]) >= STEPS]
        if move == "leave" and said:
            leaving.append(min(said, key=lambda key: hash((key, turn)) % 7))
        for key in dict.fromkeys(leaving):
            left(name, decoder, key, said.pop(key))
    for key, tokens in said.items():
        left(name, decoder, key, tokens)
    assert len(decoder) == 0 and decoder.batch_bytes == 0


def arrays(decoder: Decoder) -> dict[str, list[tuple[int, int]]]:
    """Return which arrays each sequence's trunk is made of."""
    return {
        key: [(id(layer.keys), id(layer.values)) for layer in trunk.layers.values()]
        for key, trunk in decoder.trunks.items()
    }


def left(name: str, decoder: Decoder, key: str, said: list[int]) -> None:
    """Check what a sequence said, and that what it leaves goes on as it would have."""
    number = int(key.split()[0])
    assert is_same(name, number, said), (key, said)
    before = arrays(decoder)
    unfinished = decoder.remove(key)
    assert unfinished is not None
    after = arrays(decoder)
    assert all(after[other] == before[other] for other in after), "the others' trunk is not touched"
    assert not any(other.startswith(str(STRANGER)) for other in after)
    ids = prompt(number)
    fed = len(unfinished.tokens)
    assert unfinished.tokens[: len(ids) + len(said)] == (ids + said)[:fed]
    assert len(said) <= fed - len(ids) + 1 and fed - len(ids) <= len(said) + 1
    assert all(layer.offset == fed for layer in unfinished.cache if hasattr(layer, "offset"))
    known = ids + alone(name, number)[0]
    if unfinished.tokens == known[:fed]:  # and is not a tie beside it
        with mx.stream(generation_stream):
            logits = model(name)(mx.array([known[fed : fed + 1]]), cache=unfinished.cache)
            following = int(mx.argmax(logits[0, -1]).item())
        assert is_same(name, number, [*known[len(ids) : fed + 1], following]), "it goes on alike"
