"""Tests the layouts of real models, and counted runs against runs with arrays."""

import mlx.core as mx
import pytest

from hearth.commands.replay.traces import EXCERPTS_DIR
from hearth.worker.engine.mlx_memory import MB
from scripts.harness.layouts.confirm import SMALL, confirmed
from scripts.harness.layouts.counted_layers import CountedCache, CountedLayerMap
from scripts.harness.layouts.model_layouts import ModelLayout, layout
from scripts.harness.layouts.session_scripts import render

BF16, FP32 = 2, 4


def _rows(layers: int, heads: int, size: int) -> int:
    return layers * 2 * heads * size * BF16


def _delta_state(layers: int, value_heads: int) -> int:
    """Qwen3.5: a matrix of 128 x 128 a head in float32, and the convolution's last 3 inputs."""
    channels = 2 * 16 * 128 + value_heads * 128
    return layers * (value_heads * 128 * 128 * FP32 + 3 * channels * BF16)


# bytes of a token's rows, of a window's row, the window, bytes of a state
EXPECTED = {
    "Qwen3-4B": (_rows(36, 8, 128), 0, 0, 0),
    "Qwen3.5-9B": (_rows(8, 4, 256), 0, 0, _delta_state(24, 32)),
    "Qwen3.5-27B": (_rows(16, 4, 256), 0, 0, _delta_state(48, 48)),
    "Qwen3.5-35B-A3B": (_rows(10, 2, 256), 0, 0, _delta_state(30, 32)),
    "Qwen3-32B": (_rows(64, 8, 128), 0, 0, 0),
    "Llama-3.3-70B": (_rows(80, 8, 128), 0, 0, 0),
    "gpt-oss-20b": (_rows(12, 8, 64), _rows(12, 8, 64), 128, 0),
    "gpt-oss-120b": (_rows(18, 8, 64), _rows(18, 8, 64), 128, 0),
    "Gemma-3-27B": (_rows(10, 16, 128), _rows(52, 16, 128), 1024, 0),
    "Gemma-4-26B-A4B": (_rows(5, 2, 512), _rows(25, 8, 256), 1024, 0),
    "GLM-4.5-Air": (_rows(46, 8, 128), 0, 0, 0),
    "GLM-4.7-Flash": (47 * (512 + 64) * BF16, 0, 0, 0),
    "Falcon-H1-34B": (
        *(_rows(72, 4, 128), 0, 0),
        72 * (32 * 128 * 256 * FP32 + 3 * (4096 + 2 * 2 * 256) * BF16),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_model_keeps_is_what_its_config_says(name: str) -> None:
    layers = layout(name).layers
    found = (layers.row_bytes, layers.window_bytes(1), layers.layout.window, layers.state_bytes)
    assert found == EXPECTED[name]


# Bytes that a run of tokens keeps for each, and those of a window and a state. A few bytes more may
# be kept, of positions and pending tokens; what follows from other rows is not.
POOLED = {
    # index keys beside 12 layers' rows; 36 states, and the n-grams of the layer with the table
    "Qwen3.8-Flash-Next": (
        _rows(12, 2, 256) + 12 * 128 * BF16,
        36 * (48 * 128 * 128 * FP32 + 3 * 10_240 * BF16) + 9 * 10_240 * BF16,
    ),
    # 3 layers keep a row for 2 tokens and one a row for each; all 40 have a window
    "DeepSeek-V4.1-Flash": (int(2.5 * (512 + 128)) * BF16, 40 * 128 * 512 * BF16),
    # latents, which tokens count, and a pooled key for 4 tokens; not the keys and values of them
    "GLM-5.3-Flash": (
        11 * (512 * BF16 + 1 + 128 * BF16 // 4),
        34 * (64 * 128 * 128 * FP32 + 3 * 24_576 * BF16),
    ),
    "Hy4": (78 * (512 + 64) * BF16 + 21 * 128 * BF16, 0),  # 21 layers have index keys
}
RUN = 4_096  # tokens; a multiple of every rate


@pytest.mark.parametrize("name", POOLED)
def test_a_run_of_a_model_with_several_rates_keeps_what_its_config_says(name: str) -> None:
    layers = CountedLayerMap(layout(name).probe())
    run = layers.copy_rows([CountedCache(layers, RUN)], 0, RUN, None)
    line_bytes = layers.window_bytes(layers.layout.window) + layers.state_bytes
    assert (run.nbytes / RUN, line_bytes) == pytest.approx(POOLED[name], rel=0.005)


# Billions of parameters, without prediction layers: all that are resident, and those in tables.
PUBLISHED = {
    "Qwen3.8-Flash-Next": (125, 51),
    "DeepSeek-V4.1-Flash": (552, 197),
    "GLM-5.3-Flash": (320 - 7, 0),
    "Hy4": (770, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layout_has_the_published_parameters_and_its_tables_are_not_resident(name: str) -> None:
    model: ModelLayout = layout(name)
    counts = [count / 1e9 for count in (model.resident_count, model.table_count)]
    assert counts == pytest.approx(PUBLISHED[name], rel=0.01)
    assert sum(model.weights()) == pytest.approx(model.weight_bytes, rel=0.001)
    assert model.active_bytes < model.weight_bytes / 10


def test_a_counted_slot_whose_rows_are_in_a_batch_takes_nothing() -> None:
    layers = CountedLayerMap(layout("Qwen3-4B").probe())
    assert layers.nbytes([]) == 0 < layers.nbytes([CountedCache(layers, 10, 256)])


@pytest.mark.parametrize("name", sorted(POOLED))
def test_nothing_of_a_layout_is_computed(name: str) -> None:
    model = layout(name)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert model.probe()
    assert mx.get_peak_memory() - before < MB


@pytest.mark.night
def test_a_counted_run_writes_and_reads_what_a_run_with_arrays_does() -> None:
    session = render(EXCERPTS_DIR / "openclaw-session-1.jsonl.xz", 2)
    counted, computed = confirmed(SMALL["Qwen3.5-27B"], layout("Qwen3.5-27B"), session)
    assert counted == computed
    assert counted["written"]["state"] > counted["written"]["rows"] > 0
    assert counted["read"]["state"] > 0  # behind the restart
