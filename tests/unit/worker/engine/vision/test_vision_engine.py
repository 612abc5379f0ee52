"""Prompts with images through the engine: whatever is cut, kept or interleaved, as if cold."""

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hearth.shared.errors import RequestError
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import QuantFormat
from scripts.fixtures.fixture_cache import VISION_NAMES
from scripts.harness.socketless_worker import loaded
from scripts.harness.vision_worker import prompt
from tests.helpers.models.by_day import by_day
from tests.helpers.models.vision_engine import (
    answer,
    as_mlx_vlm,
    cuts_of,
    feed,
    forget_positions,
    held,
    new_engine,
    picture,
    remembers_positions,
    restored,
    same,
    text,
)

NAMES = by_day(VISION_NAMES, ("qwen3_5_vl", "gemma3"))  # states, and windows
CHUNK = 16
MARKS = 3000  # the first token that may stand for more than text
CLOSE = 5e-3  # of logits up to 30, in fp32, where the same prompt is cut differently


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(name: str) -> Engine:
    return new_engine(name)


@settings(max_examples=6)
@given(
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=4),
    chunk=st.integers(5, 50),
)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_chunks_is_what_mlx_vlm_reads_at_once(
    name: str, turns: list[tuple[int, int]], chunk: int
) -> None:
    """Each turn is some text, and one of two images, both (one behind the other), or none."""
    one, two = picture(name, 1), picture(name, 2, 200, 60)
    shown = [[], [one], [two], [two, one]]
    parts = [p for n, (count, which) in enumerate(turns) for p in (text(n, count), *shown[which])]
    ids, runs = prompt(text(90, 5), one, *parts, text(91, 7))
    engine = new_engine(name)
    cache = feed(engine, engine.new_cache(), ids, cuts_of(len(ids), chunk), runs)
    tokens, logprobs = answer(engine, cache, ids, runs, count=4)
    # Random weights may say a video's mark, by which mlx-vlm reads all of the prompt otherwise.
    said = next((n for n, token in enumerate(tokens) if token >= MARKS), len(tokens))
    whole = mx.array(as_mlx_vlm(name, [*ids, *tokens[:said]], runs))
    expected = np.array(whole - mx.logsumexp(whole, axis=-1, keepdims=True))
    for number, row in enumerate(logprobs[: said + 1]):
        assert np.abs(row - expected[len(ids) - 1 + number]).max() < CLOSE


def test_wherever_an_image_is_split_and_forgotten_it_goes_on_as_cold(name: str) -> None:
    engine, other = new_engine(name), picture(name, 5)
    ids, runs = prompt(text(1, 9), picture(name, 1), text(2, 12))
    forgetful = new_engine(name, bytes_max=0)
    assert forgetful.vision is not None
    for split in range(runs[0].start + 1, runs[0].end):
        cuts = [0, split, len(ids) - 1]
        cold = feed(engine, engine.new_cache(), ids, cuts, runs)
        warm = feed(forgetful, forgetful.new_cache(), ids, cuts[:2], runs)
        warm = restored(forgetful, warm, split)
        forgetful.vision.encode(other)
        feed(forgetful, warm, ids, cuts[1:], runs)
        assert same(held(warm), held(cold)), split
    assert engine.vision is not None and engine.vision.encoder_calls == 1


def test_text_alone_is_forwarded_as_the_language_model_would(name: str, engine: Engine) -> None:
    """Also right after an image, which mlx-vlm's own state would remember."""
    vision = loaded(name).vision
    assert vision is not None
    ids, cuts = text(7, 70), cuts_of(70, CHUNK)
    seen, runs = prompt(picture(name, 1), text(2, 9))
    feed(engine, engine.new_cache(), seen, [0, len(seen)], runs)
    ours = feed(engine, engine.new_cache(), ids, cuts, ())
    direct = vision.language.make_cache()
    forget_positions(vision.language)
    with engine.stream():
        for start, end in pairwise(cuts):
            vision.language.model(mx.array([ids[start:end]]), cache=direct)
            mx.eval([layer.state for layer in direct])
    assert same(held(ours), held(direct))


def test_nothing_of_a_request_stays_on_the_model(name: str, engine: Engine) -> None:
    vision = loaded(name).vision
    assert vision is not None
    forget_positions(vision.language)
    ids, runs = prompt(text(1, 20), picture(name, 1), text(2, 30))
    cache = feed(engine, engine.new_cache(), ids, cuts_of(len(ids), CHUNK), runs)
    answer(engine, cache, ids, runs)
    assert not remembers_positions(vision.language)


@pytest.mark.parametrize("name", VISION_NAMES)
def test_quantised_kv_is_taken_or_refused_with_a_reason(name: str) -> None:
    reason = new_engine(name).why_not_quantised(8, 64)
    assert (reason is None) == (name != "gemma3")
    assert reason is None or "RotatingKVCache" in reason


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_vl"])
def test_rows_that_are_packed_while_it_runs_go_on_as_upstream_packs_them(
    name: str, engine: Engine
) -> None:
    form = QuantFormat(8, 64)
    ids, runs = prompt(text(1, 20), picture(name, 1), text(2, 30))
    cuts = [0, runs[0].start + 5, len(ids) - 1]
    layers, ours = LayerMap(engine.probe()), engine.new_cache()
    theirs = feed(engine, engine.new_cache(), ids, cuts[:2], runs)
    feed(engine, ours, ids, cuts[:2], runs)
    with engine.stream():
        layers.quantise(ours, form)
        for number, layer in enumerate(theirs):
            if hasattr(layer, "to_quantized"):
                theirs[number] = layer.to_quantized(group_size=64, bits=8)
    for cache in (ours, theirs):
        feed(engine, cache, ids, cuts[1:], runs)
    assert answer(engine, ours, ids, runs)[0] == answer(engine, theirs, ids, runs)[0]
    kept = layers.rows(ours, 0, 30)
    assert all(rows.format == form for rows in kept)
    again = engine.new_cache()
    with engine.stream():
        layers.quantise(again, form)
        layers.put_rows(again, [kept], 30, 100)
        assert all(
            mx.array_equal(one, other)
            for was, now in zip(kept, layers.rows(again, 0, 30), strict=True)
            for one, other in zip(was.arrays, now.arrays, strict=True)
        )


def test_an_image_that_the_encoder_does_not_take_ends_its_request_alone() -> None:
    name = "qwen3_vl"
    good = picture(name, 1)
    odd = {key: array[:-4] for key, array in good.inputs().items() if key == "pixel_values"}
    bad = replace(good, identity=b"too few patches!", inputs=lambda: {**good.inputs(), **odd})
    engine = new_engine(name)
    with pytest.raises(RequestError, match="cannot encode the image of 14 tokens") as refused:
        engine.encode(bad)
    assert (refused.value.status, refused.value.code) == (400, "image_refused")
    assert engine.encode(good) and not engine.encode(good)


def test_hidden_states_for_a_draft_model_change_no_bit_of_what_a_prompt_with_an_image_leaves() -> (
    None
):
    engine = new_engine("qwen3_5_vl")
    ids, runs = prompt(text(1, 20), picture("qwen3_5_vl", 1), text(2, 30))
    engine.encode(runs[0].picture)
    plain = feed(engine, engine.new_cache(), ids, [0, len(ids) - 1], runs)
    shown = engine.new_cache()
    hidden = engine.prefill_with_hidden(shown, ids[:-1], runs, tokens_max=16)
    assert same(held(plain), held(shown)) and hidden.shape[:2] == (1, 16)
    assert mx.all(mx.isfinite(hidden)).item()
