"""Rows in a batch against the same rows alone: what their caches hold, and the logits they get."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm.models.cache as vlm
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.decode.batch_caches import (
    BatchQuantizedKVCache,
    batch_kind,
    batches_like_alone,
    is_mergeable,
    merge_caches,
)
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import load_model
from scripts.fixtures.fixture_cache import VISION_NAMES, fixture_dir
from scripts.fixtures.vision_families import make_family
from scripts.fixtures.vision_family_configs import FAMILIES
from scripts.harness.socketless_worker import loaded

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")

HEADS, WIDTH, GROUP = 2, 64, 32
CLOSE = 1e-4  # of logits up to 30, in fp32
CLOSE_PACKED = 5e-3  # where a last bit can decide which of 256 steps a value is rounded to
# What each does instead: see the report of the trial.
IN_TURNS = {
    "paligemma": "off by",  # attends both ways, and masks nothing of what is decoded
    "mllama": "off by",  # one mask for all rows
    "llama4": "",  # chunks that mlx-lm and mlx-vlm cannot merge
    "florence2": "",  # an encoder's rows beside the decoder's
}


def rows(seed: int, count: int) -> tuple[mx.array, mx.array]:
    """Return K and V (1, heads, count, width) of some tokens."""
    chance = np.random.default_rng(seed)
    shape = (1, HEADS, count, WIDTH)
    return tuple(mx.array(chance.standard_normal(shape, dtype=np.float32)) for _ in range(2))  # type: ignore[return-value]


def packed(seed: int, count: int, made: type = QuantizedKVCache) -> Any:
    cache = made(group_size=GROUP, bits=8)
    cache.update_and_fetch(*rows(seed, count))
    return cache


def held(cache: Any) -> list[np.ndarray[Any, Any]]:
    """Return what a lone cache holds, without spare room."""
    arrays = (*cache.keys, *cache.values)
    return [np.array(array[..., : cache.offset, :]) for array in arrays]


def same(one: Any, other: Any) -> bool:
    return one.offset == other.offset and all(map(np.array_equal, held(one), held(other)))


class Batch:
    """A batch of packed rows beside the same rows alone."""

    def __init__(self) -> None:
        self.layer: Any = None
        self.alone: list[Any] = []
        self.seed = 0

    def join(self, lengths: list[int]) -> None:
        joining = [packed(self._next(), length) for length in lengths]
        (layer,) = merge_caches([[cache] for cache in joining])
        if self.layer is None:
            self.layer = layer
        else:
            self.layer.extend(layer)
        self.alone += joining

    def keep(self, kept: list[int]) -> None:
        self.alone = [self.alone[row] for row in kept]
        if kept:
            self.layer.filter(kept)
        else:
            self.layer = None

    def step(self, count: int) -> None:
        for _ in range(count if self.alone else 0):
            new = [rows(self._next(), 1) for _ in self.alone]
            for cache, (keys, values) in zip(self.alone, new, strict=True):
                cache.update_and_fetch(keys, values)
            self.layer.update_and_fetch(
                *(mx.concatenate([*each]) for each in zip(*new, strict=True))
            )

    def check(self) -> None:
        for row, cache in enumerate(self.alone):
            assert same(self.layer.extract(row), cache), row
        if self.alone:
            assert self.layer.offset.tolist() == [cache.offset for cache in self.alone]

    def _next(self) -> int:
        self.seed += 1
        return self.seed


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.lists(st.integers(1, 300), min_size=1, max_size=3)),
            st.tuples(st.just("keep"), st.permutations(range(6)), st.integers(0, 6)),
            st.tuples(st.just("step"), st.integers(1, 3)),
        ),
        max_size=8,
    )
)
def test_rows_leave_a_packed_batch_as_they_are_alone(turns: list[Any]) -> None:
    batch = Batch()
    batch.join([255])
    for what, *how in turns:
        if what == "join":
            batch.join(how[0])
        elif what == "step":
            batch.step(how[0])
        else:
            batch.keep([row for row in how[0][: how[1]] if row < len(batch.alone)])
        batch.check()


@pytest.mark.parametrize("made", [QuantizedKVCache, vlm.QuantizedKVCache])
def test_a_row_comes_back_in_the_class_that_it_came_in(made: type) -> None:
    (layer,) = merge_caches([[packed(1, 5, made)], [packed(2, 3, made)]])
    assert isinstance(layer, BatchQuantizedKVCache) and type(layer.extract(1)) is made


def test_a_batch_and_the_caches_it_was_made_of_do_not_write_into_each_other() -> None:
    cache, other = packed(1, 256), packed(1, 256)
    (layer,) = merge_caches([[cache]])
    layer.update_and_fetch(*rows(2, 1))
    cache.update_and_fetch(*rows(3, 1))
    other.update_and_fetch(*rows(2, 1))
    assert same(layer.extract(0), other) and not same(layer.extract(0), cache)


@pytest.mark.parametrize("repeats", [1, 3], ids=["each its own", "shared by three"])
def test_attention_over_packed_rows_sees_no_padding(repeats: int) -> None:
    caches = [packed(1, 40), packed(2, 7)]
    (layer,) = merge_caches([[cache] for cache in caches])
    # Upstream scales the queries that it is given in place.
    queries = np.random.default_rng(0).standard_normal((2, HEADS * repeats, 1, WIDTH), np.float32)
    new = [rows(row, 1) for row in (3, 4)]
    mask = layer.make_mask(1)
    all_rows = layer.update_and_fetch(*(mx.concatenate([*each]) for each in zip(*new, strict=True)))
    together = scaled_dot_product_attention(mx.array(queries), *all_rows, layer, 0.1, mask)
    for row, cache in enumerate(caches):
        one = mx.array(queries[row : row + 1])
        alone = scaled_dot_product_attention(
            one, *cache.update_and_fetch(*new[row]), cache, 0.1, None
        )
        assert np.abs(np.array(together[row] - alone[0])).max() < 1e-5


def test_packed_rows_and_others_are_of_two_kinds() -> None:
    raw = KVCache()
    raw.update_and_fetch(*rows(1, 4))
    assert batch_kind([raw]) != batch_kind([packed(1, 4)])
    assert batch_kind([packed(1, 4)]) == batch_kind([packed(2, 9)])
    with pytest.raises(AssertionError, match="share no batch"):
        merge_caches([[raw], [packed(1, 4)]])


# ---------------------------------------------------------------- whole models


def model_of(name: str, directory: Path) -> Any:
    if name in VISION_NAMES:
        return loaded(name).model
    make_family(name, directory / name, fixture_dir("qwen3_vl") / "tokenizer.json")
    return load_model(load_settings({"MODEL_PATH": str(directory / name)}, None)).model


def in_format(model: Any, bits: int | None) -> Callable[[], list[Any]]:
    """Return what makes caches of a model, packed while they run if `bits` says so."""

    def new_cache() -> list[Any]:
        return [
            layer.to_quantized(group_size=32, bits=bits)
            if bits and type(layer).__name__ == "KVCache"
            else layer
            for layer in make_prompt_cache(model)
        ]

    return new_cache


def logits_of(model: Any, cache: list[Any], ids: list[int], shift: Any) -> np.ndarray[Any, Any]:
    arguments = {"shift": shift} if model.takes_positions else {}
    return np.array(model(mx.array(ids)[:, None], cache=cache, **arguments)[:, -1])


@pytest.fixture(scope="module", params=[*VISION_NAMES, *(n for n in FAMILIES if n not in IN_TURNS)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_of(request.param, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(("bits", "close"), [(None, CLOSE), (8, CLOSE_PACKED)])
def test_rows_of_a_vision_model_get_the_logits_that_they_get_alone(
    model: Any, bits: int | None, close: float
) -> None:
    """Two of text, then one behind an image; one leaves, and goes on alone."""
    new_cache = in_format(model, bits)
    assert is_mergeable(new_cache()) and batches_like_alone(model, new_cache)
    prompts = [list(range(9, 9 + count)) for count in (5, 33, 12)]
    shifts = [0, 0, -7]
    caches = [new_cache() for _ in prompts]
    with mx.stream(generation_stream):
        for ids, cache in zip(prompts, caches, strict=True):
            model(mx.array([ids]), cache=cache)
        batch = merge_caches([caches[0], caches[1]])
        for layer, other in zip(batch, merge_caches([caches[2]]), strict=True):
            layer.extend(other)
        for step in range(4):
            ids = [50 + step, 70 + 2 * step, 90 + 3 * step]
            together = logits_of(model, batch, ids, shifts)
            for row, cache in enumerate(caches):
                alone = logits_of(model, cache, ids[row : row + 1], shifts[row])
                assert np.abs(together[row] - alone[0]).max() < close, (step, row)
        left = [layer.extract(1) for layer in batch]
        for layer in batch:
            layer.filter([2, 0])
        ids = [60, 61]
        together = logits_of(model, batch, ids, [shifts[2], shifts[0]])
        for place, row in enumerate((2, 0)):
            alone = logits_of(model, caches[row], ids[place : place + 1], shifts[row])
            assert np.abs(together[place] - alone[0]).max() < close, row
        on = logits_of(model, left, [62], 0)
        assert np.abs(on - logits_of(model, caches[1], [62], 0)).max() < close


@pytest.mark.parametrize("name", IN_TURNS)
def test_a_family_that_cannot_batch_is_found_out(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(name, tmp_path)
    new_cache = in_format(model, None)
    with caplog.at_level(logging.WARNING, "hearth.worker"):
        is_alike = is_mergeable(new_cache()) and batches_like_alone(model, new_cache)
    assert not is_alike
    assert IN_TURNS[name] in caplog.text


class Broken:
    """A model that does something otherwise in a batch."""

    def __init__(self, name: str, how: str) -> None:
        self.model, self._how = loaded(name).model, how
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: mx.array, cache: list[Any], **arguments: Any) -> mx.array:
        self.forwards += 1
        is_batch = ids.shape[0] > 1
        if self._how == "raises" and is_batch:
            raise ValueError("one row only")
        if self._how == "sees padding" and is_batch:
            cache = [Unmasked(layer) for layer in cache]
        if self._how == "one position for all" and is_batch:
            cache = [Levelled(layer) for layer in cache]
        if self._how == "no shifts" and is_batch:
            arguments.pop("shift", None)
        logits: mx.array = self.model(ids, cache=cache, **arguments)
        return logits


class Unmasked:
    """A layer's cache whose padding is seen."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def make_mask(self, *_: Any, **__: Any) -> Any:
        return None


class Levelled(Unmasked):
    """A layer's cache that tells the same number of tokens for each row."""

    @property
    def offset(self) -> Any:
        return mx.full(self._layer.offset.shape, self._layer.offset.max())

    def make_mask(self, *given: Any, **more: Any) -> Any:
        return self._layer.make_mask(*given, **more)


BREAKS = ("sees padding", "one position for all", "raises")


@pytest.mark.parametrize("bits", [None, 8], ids=["raw", "packed"])
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("qwen3_vl", "qwen2_5_vl") for how in (*BREAKS, "no shifts")]
    + [(name, how) for name in ("qwen3", "llama") for how in BREAKS],
)
def test_a_model_that_computes_otherwise_in_a_batch_is_found_out(
    name: str, how: str, bits: int | None
) -> None:
    new_cache = in_format(loaded(name).model, bits)
    broken, whole = Broken(name, how), Broken(name, "")
    assert not batches_like_alone(broken, new_cache)
    assert batches_like_alone(whole, new_cache) and whole.forwards == 8, "cheap where it batches"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_5_vl"])
def test_an_engine_whose_rows_are_packed_batches(name: str) -> None:
    assert Engine(loaded(name), packed=(8, 64)).decoder.is_mergeable
    assert not Engine(loaded(name), batches=False, packed=(8, 64)).decoder.is_mergeable


def test_an_engine_whose_rows_cannot_be_packed_does_not_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not Engine(loaded("gemma3"), packed=(8, 64)).decoder.is_mergeable
    assert "cannot share a forward" in caplog.text
