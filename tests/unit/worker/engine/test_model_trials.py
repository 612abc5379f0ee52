"""A model is tried before it batches, shares trunks or drafts: faults are found, and no others."""

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from hearth.shared.settings import load_settings
from hearth.worker.engine.decode import trunk_attention
from hearth.worker.engine.decode.batch import batch_kind, is_mergeable, keeps_plain_rows
from hearth.worker.engine.decode.shared_trunk import LayerTrunk, TrunkedKVCache
from hearth.worker.engine.decode.trunk_attention import attend_with_trunks, reach_trunks
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.model_trials import (
    DRAFT_ROWS,
    Attend,
    batches_like_alone,
    trunks_like_alone,
    verifies_like_alone,
)
from hearth.worker.engine.prefill_lengths import network_of
from scripts.fixtures.fixture_cache import TEXT_NAMES, VISION_NAMES, fixture_dir
from scripts.fixtures.vision_families import make_family
from scripts.fixtures.vision_family_configs import FAMILIES
from scripts.harness.socketless_worker import loaded
from tests.helpers.by_day import KINDS, by_day
from tests.helpers.models.counted_model import CountedModel

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")

# What the rows of the others' batches do not share, and why.
SHARES_NONE = {
    "glm4_moe_lite": "which rows are seen",  # latent attention: scores of positions as a mask
    "deepseek_v32": "",  # keeps its rows beside an indexer's, in a list
    "falcon_h1": "",  # keeps its rows beside states, in a list
}


NAMES = by_day(TEXT_NAMES + VISION_NAMES, (*KINDS, *SHARES_NONE))
SHARING = by_day(name for name in TEXT_NAMES + VISION_NAMES if name not in SHARES_NONE)
NUMBERS = {
    "float32": ("float32", None),
    "float16": ("float16", None),
    "bfloat16": ("bfloat16", None),
    "4 bits": ("bfloat16", 4),
}
EXPERTS = ("qwen3_moe", "qwen3_next", "gpt_oss", "glm4_moe_lite", "deepseek_v32")
COARSE = [
    pytest.param(numbers, name, marks=() if name in ("qwen3", "gpt_oss") else pytest.mark.night)
    for numbers in ("float16", "bfloat16", "4 bits")
    for name in TEXT_NAMES
    # MLX on a CPU has no experts in coarse numbers that are not packed.
    if name not in SHARES_NONE and (numbers == "4 bits" or name not in EXPERTS)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_shares_trunks_or_is_found_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hearth.worker"):
        shares = shares_trunks(loaded(name))
    assert shares == (name not in SHARES_NONE), caplog.text
    reason = SHARES_NONE.get(name, "")
    assert reason in caplog.text and ("none share a trunk" in caplog.text) == bool(reason)


@pytest.mark.parametrize(("numbers", "name"), COARSE)
def test_coarse_numbers_are_not_taken_for_a_fault(numbers: str, name: str) -> None:
    assert shares_trunks(loaded(name, *NUMBERS[numbers]))


def test_a_model_whose_code_came_with_its_checkpoint_shares_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("qwen3")
    monkeypatch.delitem(sys.modules, type(model.model).__module__)  # upstream enters such nowhere
    with caplog.at_level(logging.INFO, "hearth.worker"):
        assert not shares_trunks(model)
    assert "where that is seen" in caplog.text


def shares_trunks(model: LoadedModel) -> bool:
    """Whether some model shares trunks; where none of its layers can stand on one it does not."""
    new_cache = Engine(model).new_cache
    is_plain = keeps_plain_rows(batch_kind(new_cache()))
    return is_plain and trunks_like_alone(model.model, network_of(model), new_cache)


def tried(
    numbers: str, how: str = "", attend: Attend = attend_with_trunks, name: str = "qwen3"
) -> bool:
    model = loaded(name, *NUMBERS[numbers])
    new_cache = Engine(model, batches=False).new_cache
    broken, layers = told_otherwise(model.model, how)
    is_alike = trunks_like_alone(broken, network_of(model), new_cache, attend)
    assert bool(layers) == (how not in ("", "raises"))
    return is_alike


# ---------------------------------------------------------------- faults of what a layer is told


class Spied(TrunkedKVCache):
    """A layer that does something otherwise."""

    def __init__(self, layer: TrunkedKVCache, how: str) -> None:
        super().__init__(layer.tails, layer.trunks)
        self.how = how
        if self.how == "positions without the trunk":
            self.offset = self.tails.offset
        if self.how == "one position for all":
            self.offset = mx.full(self.offset.shape, self.offset.max())
        if self.how == "positions off by one":
            self.offset = self.offset + 1
        if self.how == "another row's trunk":
            self.trunks = [*self.trunks[1:], self.trunks[0]]
            self._group_rows()

    def make_mask(self, *args: Any, **named: Any) -> Any:
        mask = super().make_mask(*args, **named)
        return mx.ones_like(mask) if self.how == "sees padding" else mask


def told_otherwise(model: Any, how: str) -> tuple[CountedModel, list[Any]]:
    """Return a model whose rows on a trunk are told something else, and the layers that are."""
    layers: list[Any] = []

    def tell(ids: mx.array, cache: Sequence[Any], _more: dict[str, Any]) -> Sequence[Any]:
        if how == "raises" and ids.shape[0] > 1:
            raise ValueError("no trunks here")
        on_trunk = [layer for layer in cache if isinstance(layer, TrunkedKVCache)]
        if not how or not on_trunk:
            return cache
        layers.extend(on_trunk)
        return [Spied(each, how) if each in on_trunk else each for each in cache]

    return CountedModel(model, tell), layers


TOLD_OTHERWISE = (
    "positions without the trunk",
    "positions off by one",
    "one position for all",
    "another row's trunk",
    "sees padding",
    "raises",
)


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("how", TOLD_OTHERWISE)
def test_a_model_that_is_told_otherwise_on_a_trunk_is_found_out(how: str, name: str) -> None:
    assert not tried("float32", how, name=name)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_trial_that_nothing_fails_takes_eleven_forwards_of_61_tokens(numbers: str) -> None:
    model = loaded("qwen3", *NUMBERS[numbers])
    whole, _ = told_otherwise(model.model, "")
    new_cache = Engine(model, batches=False).new_cache
    assert trunks_like_alone(whole, network_of(model), new_cache)
    assert (len(whole.forwards), whole.tokens) == (11, 61)


# ---------------------------------------------------------------- faults of the attention


def on_trunks(trunks: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    """Return what gives attention a cache whose rows stand on other trunks."""
    return lambda given: TrunkedKVCache(given["cache"].tails, trunks(given["cache"].trunks))


def without_last(trunks: list[Any]) -> list[Any]:
    cut = {
        trunk: trunk and LayerTrunk(trunk.keys[..., :-1, :], trunk.values[..., :-1, :])
        for trunk in set(trunks)
    }
    return [cut[trunk] for trunk in trunks]


def coarse(out: mx.array) -> mx.array:
    """Return what coarse numbers alone have rounded further."""
    step = mx.abs(out).max() / 8
    return out if out.dtype == mx.float32 else (mx.round(out / step) * step).astype(out.dtype)


# Which argument of the attention is another, and what becomes of its result.
GIVEN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "mask ignored": ("mask", lambda given: mx.ones_like(given["mask"])),
    "trunk's last token unseen": ("cache", on_trunks(without_last)),
    "trunk of the rows in another order": ("cache", on_trunks(lambda trunks: trunks[::-1])),
    "scaled twice": ("scale", lambda given: given["scale"] ** 2),
    "sinks forgotten": ("sinks", lambda _given: None),
}
RESULTS: dict[str, Callable[[mx.array], mx.array]] = {
    "heads in another order": lambda out: out[:, ::-1],
    "not a number": lambda out: out * mx.nan,
    "coarser than its numbers": coarse,
}


def faulty(how: str) -> Attend:
    """Return attention that does something otherwise on a trunk, in all numbers or in coarse."""

    def attend(**given: Any) -> mx.array:
        name, change = GIVEN.get(how, ("scale", lambda given: given["scale"]))
        out = attend_with_trunks(**given | {name: change(given)})
        return RESULTS.get(how, lambda out: out)(out)

    return attend


ATTENDS_OTHERWISE = [
    how for how in (*GIVEN, *RESULTS) if how not in ("sinks forgotten", "coarser than its numbers")
]


@pytest.mark.parametrize("numbers", ["float32", "4 bits"])  # packed ones compute in bfloat16
@pytest.mark.parametrize("how", ATTENDS_OTHERWISE)
def test_attention_that_does_otherwise_is_found_out(how: str, numbers: str) -> None:
    assert not tried(numbers, attend=faulty(how))


@pytest.mark.parametrize("numbers", ["float32", "4 bits"])
def test_forgotten_sinks_are_found_out(numbers: str) -> None:
    assert not tried(numbers, attend=faulty("sinks forgotten"), name="gpt_oss")
    assert tried(numbers, attend=faulty(""), name="gpt_oss")


@pytest.mark.parametrize("numbers", ["float16", "bfloat16", "4 bits"])
def test_attention_that_is_coarser_than_its_numbers_is_found_out(numbers: str) -> None:
    assert not tried(numbers, attend=faulty("coarser than its numbers"))


def test_a_module_is_reached_once_and_given_back() -> None:
    network = network_of(loaded("llama"))
    module: Any = importlib.import_module(type(network).__module__)
    module.scaled_dot_product_attention = base.scaled_dot_product_attention
    take_back = reach_trunks(network)
    replaced = module.scaled_dot_product_attention
    assert replaced is not base.scaled_dot_product_attention
    reach_trunks(network)()
    assert module.scaled_dot_product_attention is replaced, (
        "who replaced nothing takes back nothing"
    )
    take_back()
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_attention_that_takes_no_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(loaded("llama"))
    module: Any = importlib.import_module(type(network).__module__)
    monkeypatch.setattr(module, trunk_attention.NAME, mx.fast.scaled_dot_product_attention)
    reach_trunks(network)
    assert module.scaled_dot_product_attention is mx.fast.scaled_dot_product_attention


# What each does instead: see the report of the trial.
IN_TURNS = {
    "paligemma": "off by",  # attends both ways, and masks nothing of what is decoded
    "mllama": "off by",  # one mask for all rows
    "llama4": "",  # chunks that mlx-lm and mlx-vlm cannot merge
}
BY_DAY = ("qwen3_vl", "gemma3", "paligemma", "llama4")
FAMILIES_BY_DAY = [
    pytest.param(name, marks=() if name in BY_DAY else pytest.mark.night)
    for name in (*VISION_NAMES, *FAMILIES)
    if name != "florence2"  # which is refused as a whole
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


@pytest.mark.parametrize("name", FAMILIES_BY_DAY)
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


COARSE_DRAFTS = [
    (numbers, name)
    for numbers in NUMBERS
    for name in TEXT_NAMES
    # MLX on a CPU has no experts in coarse numbers that are not packed.
    if numbers != "float32" and (numbers == "4 bits" or name not in EXPERTS)
    # Rounding of these fixtures in 4 bits is as large as a fault: they are found not to verify.
    if name not in ("glm4_moe_lite", "deepseek_v32")
]


class DraftSpied:
    """A layer's cache that tells a forward of several tokens something else than its own."""

    def __init__(self, layer: Any, how: str) -> None:
        self._layer, self._how = layer, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def offset(self) -> Any:
        return self._layer.offset + (self._how == "positions off by one")

    def make_mask(self, count: int, *_: Any, **__: Any) -> Any:
        held = self._layer.offset
        seen = mx.tril(mx.ones((count, held + count), dtype=mx.bool_), held)
        if self._how == "attends both ways":
            return mx.ones_like(seen)
        if self._how == "a row sees itself alone of a draft":
            return mx.concatenate([seen[:, :held], mx.eye(count, dtype=mx.bool_)], axis=1)
        if self._how == "the cache is not seen":
            return mx.concatenate([mx.zeros((count, held), dtype=mx.bool_), seen[:, held:]], 1)
        return seen


class Broken(CountedModel):
    """A model that verifies drafts of some tokens otherwise."""

    def __init__(self, model: Any, how: str = "") -> None:
        super().__init__(model, self._told)
        self.how = how

    def _told(self, ids: mx.array, cache: Sequence[Any], _: dict[str, Any]) -> Sequence[Any]:
        is_draft = ids.shape[1] == DRAFT_ROWS
        if is_draft and self.how == "raises":
            raise ValueError("no drafts here")
        is_told = is_draft and bool(self.how)
        return [DraftSpied(each, self.how) if is_told and counts(each) else each for each in cache]

    def __call__(self, ids: mx.array, cache: Sequence[Any], **how: Any) -> mx.array:
        logits = super().__call__(ids, cache, **how)
        if ids.shape[1] == DRAFT_ROWS and self.how == "rows it does not count":
            for layer in filter(counts, cache):
                layer.offset -= 1
        is_lost = ids.shape[1] == DRAFT_ROWS and self.how == "not a number"
        return logits * mx.nan if is_lost else logits


def counts(layer: Any) -> bool:
    """Whether a layer has rows of tokens, not a state."""
    return hasattr(layer, "offset")


def verifies(broken: Broken) -> bool:
    return verifies_like_alone(broken, lambda: make_prompt_cache(broken.model))


FAULTS = (
    "positions off by one",
    "attends both ways",
    "a row sees itself alone of a draft",
    "the cache is not seen",
    "rows it does not count",
    "not a number",
    "raises",
)
# Those whose layers, or some, are plain caches or windows, and that take their masks from them.
TELLABLE = ("qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_next", "gpt_oss", "gemma3_text")


@pytest.mark.parametrize("name", by_day(TEXT_NAMES + VISION_NAMES))
def test_whole_models_verify_drafts_in_seven_forwards_of_24_tokens(name: str) -> None:
    engine = Engine(loaded(name))
    model = Broken(loaded(name).model)
    assert verifies_like_alone(model, engine.new_cache)
    assert (len(model.forwards), model.tokens) == (7, 24)


@pytest.mark.parametrize(
    "name", ["mlx_vlm/deepseek_v4", "mlx_vlm/glm5_next", "mlx_lm/nemotron-nas"]
)
def test_pooled_rows_and_layers_without_attention_forbid_no_drafts(name: str) -> None:
    engine = Engine(loaded(name), batches=False)
    assert verifies_like_alone(engine._model, engine.new_cache)


@pytest.mark.night
@pytest.mark.parametrize(("numbers", "name"), COARSE_DRAFTS)
def test_coarse_numbers_are_not_taken_for_a_fault_of_drafts(numbers: str, name: str) -> None:
    model = Broken(loaded(name, *NUMBERS[numbers]).model)
    assert verifies(model)


@pytest.mark.parametrize("name", by_day(TELLABLE))
@pytest.mark.parametrize("how", FAULTS)
def test_a_model_that_verifies_otherwise_is_found_out(name: str, how: str) -> None:
    assert not verifies(Broken(loaded(name).model, how))


@pytest.mark.night
@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_is_found_in_coarse_numbers_too(how: str) -> None:
    assert not verifies(Broken(loaded("qwen3", *NUMBERS["4 bits"]).model, how))


def test_being_told_what_holds_is_no_fault() -> None:
    assert verifies(Broken(loaded("qwen3").model, "nothing"))
