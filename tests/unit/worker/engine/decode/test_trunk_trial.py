"""The trial lets models share trunks in any numbers, and finds faults in all of them."""

import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from hearth.worker.engine.decode import trunk_attention
from hearth.worker.engine.decode.batch_caches import (
    batch_kind,
    keeps_plain_rows,
    merge_caches,
)
from hearth.worker.engine.decode.shared_trunk import LayerTrunk, TrunkedKVCache
from hearth.worker.engine.decode.trunk_attention import attend_with_trunks, reach_trunks
from hearth.worker.engine.decode.trunk_trial import Attend, join_trunks, trunks_like_alone
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.prefill_lengths import network_of
from scripts.fixtures.fixture_cache import TEXT_NAMES, VISION_NAMES
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.by_day import KINDS, by_day
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
EXPERTS = ("qwen3_moe", "qwen3_next", "gpt_oss", "glm4_moe_lite")
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
            self._note_groups()

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


@pytest.mark.night
@pytest.mark.parametrize("how", TOLD_OTHERWISE)
def test_packed_weights_hide_nothing_of_that(how: str) -> None:
    assert not tried("4 bits", how)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_trial_that_nothing_fails_takes_eleven_forwards_of_61_tokens(numbers: str) -> None:
    model = loaded("qwen3", *NUMBERS[numbers])
    whole, _ = told_otherwise(model.model, "")
    new_cache = Engine(model, batches=False).new_cache
    assert trunks_like_alone(whole, network_of(model), new_cache)
    assert (len(whole.forwards), whole.tokens) == (11, 61)


# ---------------------------------------------------------------- faults of the attention


def without_last(trunk: LayerTrunk | None) -> LayerTrunk | None:
    return trunk and LayerTrunk(trunk.keys[..., :-1, :], trunk.values[..., :-1, :])


def faulty(how: str) -> Attend:
    """Return attention that does something otherwise on a trunk, in all numbers or in coarse."""

    def attend(**given: Any) -> mx.array:
        cache: TrunkedKVCache = given["cache"]
        if how == "mask ignored":
            given["mask"] = mx.ones_like(given["mask"])
        if how == "trunk's last token unseen":
            cut = {trunk: without_last(trunk) for trunk in set(cache.trunks)}
            given["cache"] = TrunkedKVCache(cache.tails, [cut[trunk] for trunk in cache.trunks])
        if how == "trunk of the rows in another order":
            given["cache"] = TrunkedKVCache(cache.tails, cache.trunks[::-1])
        if how == "scaled twice":
            given["scale"] = given["scale"] * given["scale"]
        if how == "sinks forgotten":
            given["sinks"] = None
        out = attend_with_trunks(**given)
        if how == "heads in another order":
            out = out[:, ::-1]
        if how == "not a number":
            out = out * mx.nan
        if how == "coarser than its numbers" and out.dtype != mx.float32:
            step = mx.abs(out).max() / 8
            out = (mx.round(out / step) * step).astype(out.dtype)
        return out

    return attend


ATTENDS_OTHERWISE = (
    "mask ignored",
    "trunk's last token unseen",
    "trunk of the rows in another order",
    "scaled twice",
    "heads in another order",
    "not a number",
)


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


def test_a_layer_that_attends_by_other_means_is_found_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = loaded("qwen3")
    new_cache = Engine(model, batches=False).new_cache
    with caplog.at_level(logging.INFO, "hearth.worker"):
        assert not trunks_like_alone(model.model, nn.Linear(1, 1), new_cache)
    assert "none share a trunk" in caplog.text


def test_without_the_replaced_name_no_model_attends_a_trunk() -> None:
    """Once this fails, upstream asks the cache, or MLX tells a log-sum-exp: replace nothing."""
    network = network_of(loaded("qwen3"))
    module: Any = importlib.import_module(type(network).__module__)
    module.scaled_dot_product_attention = base.scaled_dot_product_attention
    new_cache = Engine(loaded("qwen3"), batches=False).new_cache
    assert not trunks_like_alone(loaded("qwen3").model, nn.Linear(1, 1), new_cache)
    told = (mx.fast.scaled_dot_product_attention.__doc__ or "").lower()
    assert told and "logsumexp" not in told and "log-sum-exp" not in told


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


def test_a_trial_leaves_a_model_that_failed_as_it_was() -> None:
    module: Any = importlib.import_module(type(network_of(loaded("qwen3"))).__module__)
    before = module.scaled_dot_product_attention
    assert not tried("float32", "raises")
    assert module.scaled_dot_product_attention is before


def test_joined_rows_are_the_trunk_and_the_tail_of_each_behind_padding() -> None:
    tails = merge_caches([[cache] for cache in (filled(3), filled(5), filled(2))])[0]
    trunks = [LayerTrunk(*kv(4, 9.0)), None, LayerTrunk(*kv(6, 7.0))]
    layer = TrunkedKVCache(tails, trunks)
    keys, values = tails.keys_and_values()
    given = {"queries": mx.zeros((3, 4, 1, 8)), "keys": keys, "values": values}
    joined = join_trunks({**given, "cache": layer, "mask": layer.tails.make_mask(1)[..., :5]})
    assert joined["cache"] is tails and joined["keys"].shape == (3, 2, 11, 8)
    seen = [
        [
            float(joined[name][row, 1, place, 0])
            for place in range(11)
            if joined["mask"][row, 0, 0, place]
        ]
        for row in range(3)
        for name in ("keys", "values")
    ]
    assert seen[0] == seen[1] == [9.0] * 4 + [1.0] * 3
    assert seen[2] == seen[3] == [1.0] * 5
    assert seen[4] == seen[5] == [7.0] * 6 + [1.0] * 2


def kv(count: int, value: float) -> tuple[mx.array, mx.array]:
    return mx.full((1, 2, count, 8), value), mx.full((1, 2, count, 8), value)


def filled(count: int) -> Any:
    cache = KVCache()
    cache.update_and_fetch(*kv(count, 1.0))
    return cache
