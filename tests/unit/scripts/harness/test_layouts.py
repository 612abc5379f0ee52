"""Tests the layouts of real models, and counted runs against runs with arrays."""

import pytest

from hearth.commands.replay.traces import EXCERPTS_DIR
from scripts.harness.layouts.confirm import SMALL, confirmed
from scripts.harness.layouts.model_layouts import layout
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


@pytest.mark.night
def test_a_counted_run_writes_and_reads_what_a_run_with_arrays_does() -> None:
    session = render(EXCERPTS_DIR / "openclaw-session-1.jsonl.xz", 2)
    counted, computed = confirmed(SMALL["Qwen3.5-27B"], layout("Qwen3.5-27B"), session)
    assert counted == computed
    assert counted["written"]["state"] > counted["written"]["rows"] > 0
    assert counted["read"]["state"] > 0  # behind the restart
