"""Tests the layouts of real models, and counted runs against runs with arrays."""

import mlx.core as mx
import numpy as np
import pytest

from hearth.commands.replay.traces import EXCERPTS_DIR
from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import PrefixHash, common_length
from hearth.worker.disk.file_format import Array, Record, encode
from hearth.worker.disk.file_names import FileKind
from hearth.worker.engine.layer_exactness import differs_when_decoded
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.serialise_kv import arrays_of_rows, arrays_of_state
from scripts.harness.layouts import counted_disk
from scripts.harness.layouts.confirm import SMALL, confirmed
from scripts.harness.layouts.counted_layers import CountedLayerMap, hollow
from scripts.harness.layouts.model_layouts import LAYOUTS, layout
from scripts.harness.layouts.pair_replay import replay_pair
from scripts.harness.layouts.session_scripts import SessionScript, ideals, render
from scripts.harness.layouts.simulated_clock import SimulatedClock
from scripts.harness.socketless_worker import machine
from scripts.harness.store_builders import ROOT

BF16, FP32 = 2, 4
MIB = 1024**2


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
PARAMETERS = {  # billions, as published: all, and those that a token goes through
    "Qwen3-4B": (4.0, 4.0),
    "Qwen3.5-9B": (9.0, 7.9),
    "Qwen3.5-27B": (26.9, 25.6),
    "Qwen3.5-35B-A3B": (34.7, 2.9),
    "Qwen3-32B": (32.8, 32.0),
    "Llama-3.3-70B": (70.6, 69.5),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "Gemma-3-27B": (27.0, 27.0),
    "GLM-4.5-Air": (106.8, 12.8),
    "GLM-4.7-Flash": (29.9, 3.6),  # without the layer that drafts
    "Falcon-H1-34B": (33.6, 32.3),
}


@pytest.fixture(scope="module")
def session() -> SessionScript:
    return render(EXCERPTS_DIR / "openclaw-session-1.jsonl.xz", 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_model_keeps_is_what_its_config_says(name: str) -> None:
    layers = layout(name).layers
    found = (layers.row_bytes, layers.window_bytes(1), layers.layout.window, layers.state_bytes)
    assert found == EXPECTED[name]


def test_a_state_of_qwen3_5_27b_is_147_mib_and_its_rows_64_kb_a_token() -> None:
    layers = layout("Qwen3.5-27B").layers
    assert round(layers.state_bytes / MIB) == 147
    assert layers.row_bytes == 64 * 1024
    assert (layers.row_cost(None)[1], layers.state_buffers) == (2 * 16, 2 * 48)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    each = layout(name)
    found = each.parameter_count / 1e9, each.active_count / 1e9
    assert found == pytest.approx(PARAMETERS[name], abs=0.06)


def test_exactness_is_that_of_the_architectures() -> None:
    exact = [each.name for each in LAYOUTS if differs_when_decoded(each.model, each.is_hybrid)]
    assert exact == ["GLM-4.7-Flash", "Falcon-H1-34B"]  # MLA, Mamba2


def test_a_hollow_array_is_as_large_as_a_real_one_and_takes_no_memory() -> None:
    before = mx.get_active_memory()
    array = hollow((1, 8, 1 << 20, 128), mx.bfloat16)
    assert array.nbytes == 2 << 30
    assert mx.get_active_memory() - before < MIB


@pytest.mark.parametrize("fixture", ["qwen3_5", "gpt_oss"])
def test_counted_layers_give_what_real_ones_give(fixture: str) -> None:
    real_machine = machine(fixture, tiny=True)
    cache = real_machine.engine.probe()
    real, counted = LayerMap(cache), CountedLayerMap(cache)
    tokens = 40
    live = real_machine.engine.new_cache()
    real_machine.engine.prefill(live, list(range(tokens)))
    hollow_cache = counted.new_cache()
    assert counted.reserve(hollow_cache, 100) == 256
    hollow_cache[0].offset = tokens
    assert counted.depth(hollow_cache) == real.depth(live) == tokens
    pairs = [(real.copy_rows(live, 3, 30, None), counted.copy_rows(hollow_cache, 3, 30, None))]
    held = real.window_held(live)
    assert counted.window_held(hollow_cache) == held
    if held:
        pairs.append((real.copy_window(live, held), counted.copy_window(hollow_cache, held)))
    for one, other in pairs:
        assert (one.nbytes, one.buffers) == (other.nbytes, other.buffers)
        assert _file_bytes(arrays_of_rows(one.layers)) == _file_bytes(arrays_of_rows(other.layers))
    if real.layout.has_state:
        state, same = real.take_state(live), counted.take_state(hollow_cache)
        assert (state.nbytes, state.buffers) == (same.nbytes, same.buffers)
        assert _file_bytes(arrays_of_state(state)) == _file_bytes(arrays_of_state(same))


@pytest.mark.parametrize("fixture", ["qwen3_5", "gpt_oss"])
def test_what_is_kept_twice_counts_twice(fixture: str) -> None:
    counted = CountedLayerMap(machine(fixture, tiny=True).engine.probe())
    cache = counted.new_cache()
    counted.reserve(cache, 100)
    cache[0].offset = 40
    assert counted.copy_rows(cache, 0, 30, None) is not counted.copy_rows(cache, 0, 30, None)
    if counted.layout.window:
        assert counted.copy_window(cache, 9) is not counted.copy_window(cache, 9)
    if counted.layout.has_state:
        assert counted.take_state(cache) is not counted.take_state(cache)


def _file_bytes(arrays: tuple[Array, ...]) -> int:
    """Return a file's size, once it is known that it is counted as it is written."""
    tokens = np.arange(27, dtype=np.int32)
    end = PrefixHash(bytes(len(ROOT)))
    record = Record(ROOT, ROOT, end, 0, tokens, True, FileKind.ROWS, arrays)
    (hole,) = counted_disk.Disk().encode(record)
    assert len(hole) == sum(map(len, encode(record)))
    return len(hole)


def test_a_counted_run_writes_and_reads_what_a_run_with_arrays_does(
    session: SessionScript,
) -> None:
    counted, computed = confirmed(SMALL["Qwen3.5-27B"], layout("Qwen3.5-27B"), session)
    assert counted == computed
    assert counted["written"]["state"] > counted["written"]["rows"] > 0
    assert counted["read"]["state"] > 0  # behind the restart


def test_a_replay_comes_to_the_same_figures_again(session: SessionScript) -> None:
    one, other = (replay_pair(layout("gpt-oss-20b"), 32, [session], {}) for _ in range(2))
    assert one is not None and other is not None
    assert one.sessions == other.sessions
    total = one.total
    assert total.written["window"] > 0 and total.prefilled >= total.ideal > 0
    assert replay_pair(layout("gpt-oss-120b"), 32, [session], {}) is None  # it does not fit


def test_the_ideal_reads_only_what_nothing_before_begins_with(session: SessionScript) -> None:
    first, second = session.turns
    found = ideals(session, 1 << 30)
    shared = common_length(second.tokens, first.held)
    assert found == [len(first.ids), len(second.ids) - min(shared, len(second.ids) - 1)]
    assert ideals(session, 10) == [0, 0]  # refused


def test_simulated_time_passes_on_all_clocks() -> None:
    clock = SimulatedClock()
    with clock.installed():
        before = awake_s()
        clock.advance(3_600.0)
        assert awake_s() - before == pytest.approx(3_600.0)
