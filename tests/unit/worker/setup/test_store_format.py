"""Stored KV is packed as the settings say, where the model's rows allow it; else that is told."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.quantise_kv import QuantFormat, TurboFormat
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.setup import kv_setup
from scripts.harness.socketless_worker import loaded

CUTS = CutRule(64, TurnMarks(frozenset(), ()))

TURBO = {"CACHE_STORE_BITS": "3.5", "KV_QUANT_SCHEME": "turboquant"}


class RowsOf:
    """An engine whose model keeps rows of `width` elements."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.decoder = SimpleNamespace(cost=None)

    def probe(self, tokens: int = 0) -> list[Any]:
        layer = KVCache()
        layer.update_and_fetch(*[mx.zeros((1, 1, 3, self._width), mx.bfloat16)] * 2)
        return [layer]

    def new_cache(self) -> list[Any]:
        return [KVCache()]


def rules_of(width: int, environ: dict[str, str], model: Any = None) -> KeepRules:
    engine: Any = RowsOf(width)
    settings = load_settings(environ | {"MAX_KV_SIZE_GB": "0"}, None)
    manager = kv_setup.make_kv_manager(engine, model or loaded("qwen3"), settings, CUTS)
    assert isinstance(manager, KVManager)
    return manager.rules


def test_nothing_is_packed_by_default() -> None:
    rules = rules_of(64, {})
    assert rules.store_format is None
    assert (rules.store_from, rules.store_ignored) == (256, "")
    assert (rules.running_format, rules.running_from) == (None, 5_000)


def test_the_settings_say_how_rows_are_packed_and_from_where() -> None:
    rules = rules_of(64, {"CACHE_STORE_BITS": "4", "KV_GROUP_SIZE": "32"})
    assert (rules.store_format, rules.store_from) == (QuantFormat(4, 32), 256)
    rules = rules_of(64, TURBO)
    assert rules.store_format == TurboFormat(3.5, mx.bfloat16)


def test_rows_that_do_not_fit_are_stored_as_they_are_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = rules_of(80, {"CACHE_STORE_BITS": "8"})
    assert rules.store_format is None
    reason = "rows of 80 elements are no multiples of KV_GROUP_SIZE=64"
    assert rules.store_ignored == reason
    assert f"CACHE_STORE_BITS is ignored: {reason}" in caplog.text
    assert rules_of(80, {"CACHE_STORE_BITS": "8", "KV_GROUP_SIZE": "32"}).store_format is None


@pytest.mark.parametrize("width", [80, 1_056])
def test_turboquant_refuses_to_start_where_it_packs_no_layer(width: int) -> None:
    with pytest.raises(StartError, match=f"rows have {width} elements, .* multiples of 32 up to"):
        rules_of(width, TURBO)


def test_turboquant_refuses_to_start_without_mlx_vlm_and_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_setup, "has_vision", lambda: False)
    with pytest.raises(StartError, match=r"mlx-vlm, .* is not installed: install the extra"):
        rules_of(64, TURBO)
    assert rules_of(64, {"CACHE_STORE_BITS": "4"}).store_format == QuantFormat(4, 64)


@pytest.mark.parametrize("environ", [{"CACHE_STORE_BITS": "8"}, TURBO])
def test_an_exact_model_ignores_the_bits_and_says_so(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_setup, "has_vision", lambda: False)  # nor needs what would pack
    rules = rules_of(64, environ, loaded("glm4_moe_lite", "bfloat16", 4))
    assert rules.is_exact and rules.store_format is None
    assert rules.store_ignored == "this model reuses exact KV only (CACHE_EXACT)"
