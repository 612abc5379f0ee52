"""Whole models get in a batch the logits that they get alone, or are found out."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.decode.batch_caches import batches_like_alone, is_mergeable
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import load_model
from scripts.fixtures.fixture_cache import VISION_NAMES, fixture_dir
from scripts.fixtures.vision_families import make_family
from scripts.fixtures.vision_family_configs import FAMILIES
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.counted_model import CountedModel

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")

# What each does instead: see the report of the trial.
IN_TURNS = {
    "paligemma": "off by",  # attends both ways, and masks nothing of what is decoded
    "mllama": "off by",  # one mask for all rows
    "llama4": "",  # chunks that mlx-lm and mlx-vlm cannot merge
    "florence2": "",  # an encoder's rows beside the decoder's
}
BY_DAY = ("qwen3_vl", "gemma3", "paligemma", "llama4")
NAMES = [
    pytest.param(name, marks=() if name in BY_DAY else pytest.mark.night)
    for name in (*VISION_NAMES, *FAMILIES)
]


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


@pytest.mark.parametrize("name", NAMES)
def test_a_family_batches_or_is_found_out(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(name, tmp_path)
    for bits in (None, 8):
        new_cache = in_format(model, bits)
        with caplog.at_level(logging.WARNING, "hearth.worker"):
            is_alike = is_mergeable(new_cache()) and batches_like_alone(model, new_cache)
        assert is_alike == (name not in IN_TURNS)
        assert IN_TURNS.get(name, "") in caplog.text


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


def broken(model: Any, how: str) -> CountedModel:
    """Return a model that does something otherwise in a batch."""

    def tell(ids: mx.array, cache: Sequence[Any], more: dict[str, Any]) -> Sequence[Any]:
        if ids.shape[0] == 1:
            return cache
        if how == "raises":
            raise ValueError("one row only")
        if how == "no shifts":
            more.pop("shift", None)
        made: Any = {"sees padding": Unmasked, "one position for all": Levelled}.get(how)
        return [made(layer) for layer in cache] if made else cache

    return CountedModel(model, tell)


@pytest.mark.parametrize("bits", [None, 8], ids=["raw", "packed"])
@pytest.mark.parametrize(
    ("name", "how"),
    [("qwen3_vl", how) for how in (*BREAKS, "no shifts")] + [("qwen3", how) for how in BREAKS],
)
def test_a_model_that_computes_otherwise_in_a_batch_is_found_out(
    name: str, how: str, bits: int | None
) -> None:
    model = loaded(name).model
    new_cache, whole = in_format(model, bits), broken(model, "")
    assert not batches_like_alone(broken(model, how), new_cache)
    assert batches_like_alone(whole, new_cache)
    assert len(whole.forwards) == 8, "cheap where it batches"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_5_vl"])
def test_an_engine_whose_rows_are_packed_batches(name: str) -> None:
    assert Engine(loaded(name), packed=(8, 64)).decoder.is_mergeable
    assert not Engine(loaded(name), batches=False, packed=(8, 64)).decoder.is_mergeable


def test_an_engine_whose_rows_cannot_be_packed_does_not_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not Engine(loaded("gemma3"), packed=(8, 64)).decoder.is_mergeable
    assert "cannot share a forward" in caplog.text
