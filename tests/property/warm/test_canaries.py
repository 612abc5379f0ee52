"""Low precision and wrong rules: where KV of another cut shows, and that the tests would see it."""

from typing import Any

import mlx.core as mx
import pytest

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.prompt.prefill_cuts import CutRule
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.socketless_worker import Machine, loaded, machine, marks, vocabulary
from tests.helpers.by_day import by_day
from tests.helpers.worker.cold_difference import difference

BF16 = ["qwen3", "qwen3_5", "gemma3_text", "falcon_h1", "llama"]
FOUR_BIT = [
    *("qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_next", "gpt_oss", "gemma3_text"),
    *("glm4_moe_lite", "deepseek_v32", "falcon_h1"),
]


@pytest.mark.parametrize("name", by_day(BF16, ("gemma3_text", "falcon_h1")))
def test_in_bf16_exact_mode_is_a_cold_run_to_the_bit(name: str) -> None:
    rules: dict[str, Any] = {"dtype": "bfloat16", "is_exact": True}
    assert difference(machine(name, **rules), machine(name, keeps=False, **rules), name) == 0


@pytest.mark.parametrize("name", by_day(FOUR_BIT, ("deepseek_v32",)))
def test_in_four_bits_exact_mode_is_a_cold_run_to_the_bit(name: str) -> None:
    rules: dict[str, Any] = {"dtype": "bfloat16", "quant": 4, "is_exact": True}
    warm, cold = machine(name, **rules), machine(name, keeps=False, **rules)
    assert difference(warm, cold, name, length=25) == 0


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("qwen3_5", None),
        pytest.param("qwen3", None, marks=pytest.mark.night),
        pytest.param("qwen3", 4, marks=pytest.mark.night),
    ],
)
def test_in_float16_that_bfloat16_was_cast_to_exact_mode_is_a_cold_run_to_the_bit(
    name: str, quant: int | None
) -> None:
    path = str(fixture_dir(name, "bfloat16", quant))
    model = load_model(load_settings({"MODEL_PATH": path, "DTYPE": "float16"}, None))
    warm, cold = (
        Machine(model, marks(name), vocabulary(name), keeps=keeps, is_exact=True)
        for keeps in (True, False)
    )
    assert difference(warm, cold, name, length=4 if quant else 20) == 0
    assert set(warm.layers.row_dtypes) == {mx.float16}, "rows of as many bytes as before"


class EveryEight(CutRule):
    """Cuts that depend on where the last one was, not on the tokens: what the rule forbids."""

    def cuts(self, ids: Any) -> list[int]:
        return [*range(8 + len(ids) % 7, len(ids) - 1, 40), len(ids) - 1]


@pytest.mark.parametrize(
    ("name", "dtype", "quant"),
    [
        ("qwen3", "float32", None),
        ("gemma3_text", "float32", None),
        ("qwen3_5", "float32", None),
        ("falcon_h1", "bfloat16", None),
        ("glm4_moe_lite", "bfloat16", 4),
    ],
)
def test_cuts_that_are_not_the_tokens_own_would_be_seen(
    name: str, dtype: str, quant: int | None
) -> None:
    """The negative control: with fast KV counted as exact, or other cuts, bits differ."""
    model = {"dtype": dtype, "quant": quant}
    warm = machine(name, **model)  # default mode: continues what decoding wrote
    cold = machine(name, keeps=False, is_exact=True, **model)
    assert difference(warm, cold, name, 40 if quant else 60) > 0
    odd = Machine(loaded(name, dtype, quant), marks(name), vocabulary(name), keeps=False)
    odd.rule = EveryEight(64, marks(name))
    assert difference(odd, cold, name, 40 if quant else 60) > 0
