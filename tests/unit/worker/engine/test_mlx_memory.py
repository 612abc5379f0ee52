"""Memory on devices that are made up, of this process, and of a forward, counted and foretold."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine import mlx_memory, system_state
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import ForwardMemory, forward_memory, forward_of
from hearth.worker.engine.mlx_memory import GB, default_limit, memory_limit, working_bytes
from hearth.worker.engine.system_state import MEASURES_MAX, OVERHEAD_MAX, MemoryUse, process_bytes
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.setup.memory_setup import WorkerMemory
from scripts.harness.socketless_worker import loaded
from tests.helpers.by_day import by_day

ENDPOINT = "ipc://{}/worker-{}.sock"


class Device:
    """A Mac as MLX tells of it, and what was asked of it."""

    def __init__(self, gb: float, recommended_gb: float, patch: pytest.MonkeyPatch) -> None:
        told = {"memory_size": int(gb * GB)}
        told["max_recommended_working_set_size"] = int(recommended_gb * GB)
        self.calls: list[tuple[str, int]] = []
        patch.setattr(mx, "device_info", lambda *_: told)
        for name in ("set_wired_limit", "set_memory_limit"):
            patch.setattr(mx, name, lambda size, name=name: self.calls.append((name, size)) or 0)

    def wired(self) -> list[int]:
        return [size for name, size in self.calls if name == "set_wired_limit"]


@pytest.mark.parametrize(
    ("machine_gb", "recommended_gb", "limit_gb"),
    [
        *((8, 5.3, 5.3), (16, 10.7, 10.7), (16, 14, 12), (36, 27, 27), (64, 48, 48), (64, 60, 56)),
        *((512, 464, 464), (512, 510, 504), (24, None, 18), (512, None, 504)),
    ],
)
def test_the_default_limit_leaves_the_system_its_reserve(
    machine_gb: float, recommended_gb: float | None, limit_gb: float
) -> None:
    recommended = None if recommended_gb is None else int(recommended_gb * GB)
    assert default_limit(recommended, machine_gb * GB) == pytest.approx(limit_gb * GB, abs=1)


def test_a_setting_stands_for_all_workers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(24, 17.8, monkeypatch)
    assert memory_limit(load_settings({}, None)) == int(17.8 * GB)
    assert memory_limit(load_settings({"MEMORY_LIMIT_MB": "700"}, None)) == 700 << 20


def test_a_life_wires_its_weights_twice_and_nothing_at_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = Device(24, 17.8, monkeypatch)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GB)
    memory = WorkerMemory(load_settings({}, None), ENDPOINT.format(tmp_path, 0))
    memory.admit(3 * GB)
    memory.loaded([2 * GB, 1_000, 100])  # one of a page, one in the heap
    mlx_memory.unwire()
    assert device.wired() == [3 * GB, 2 * GB + (1 << 20) + 16_384 - 1_000 - 100, 0]


def test_workers_share_what_their_models_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Device(64, 48, monkeypatch)
    settings = load_settings({"WORKERS": "2"}, None)
    large, small = (WorkerMemory(settings, ENDPOINT.format(tmp_path, n)) for n in (0, 1))
    large.admit(30 * GB)
    small.admit(4 * GB)
    assert (large.share.limit, small.share.limit) == (39 * GB, 9 * GB), "never more than 48"
    large.share.refresh()
    small.share.refresh()
    assert (large.share.limit, small.share.limit) == (37 * GB, 11 * GB)
    small.share.release()
    large.share.refresh()
    assert large.share.limit == 39 * GB
    with pytest.raises(StartError, match=r"20\.0 GB.*17\.1 GB.*beside the 30\.0 GB.*WORKERS"):
        small.admit(20 * GB)
    large.share.refresh()
    assert large.share.others_bytes == 0, "what was refused claims nothing"


@pytest.mark.parametrize(
    "content", [b"", b"12", b"12 x", b"-5 7", b"\xff\xfe", "٣ ٣".encode(), b"1 2 3"]
)
def test_a_file_that_says_nothing_counts_as_nothing(
    content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Device(24, 17.8, monkeypatch)
    (tmp_path / "worker-1.weights").write_bytes(content)
    settings = load_settings({"WORKERS": "2", "MEMORY_LIMIT_MB": "1000"}, None)
    share = WorkerMemory(settings, ENDPOINT.format(tmp_path, 0)).share
    share.claim(0)
    assert share.others_bytes == 0 and share.limit == 500 << 20


@pytest.mark.parametrize(("limit_gb", "kept_mb"), [(10.7, 547), (48, 1024), (464, 1024)])
def test_freed_buffers_stay_between_forwards_up_to_what_a_limit_leaves(
    limit_gb: float, kept_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(mx, "get_memory_limit", lambda: int(limit_gb * GB))
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    for held_mb, clears in ((kept_mb, 0), (kept_mb + 1, 1)):
        monkeypatch.setattr(mx, "get_cache_memory", lambda held_mb=held_mb: held_mb << 20)
        mlx_memory.return_freed()
        assert len(cleared) == clears


def test_a_prefill_leaves_its_buffers_for_the_next_chunk_and_gives_back_what_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(loaded("qwen3"))
    mx.clear_cache()
    limit = mx.get_memory_limit()
    cache = engine.new_cache()
    engine.prefill(cache, [1] * 64)
    kept = mx.get_cache_memory()
    assert 0 < kept <= working_bytes(limit)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: kept)  # of which 1 / 20 may stay
    engine.prefill(cache, [1] * 64)
    assert mx.get_cache_memory() == 0


def test_a_device_that_recommends_nothing_wires_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", asked.append)
    mlx_memory.wire(GB)
    mlx_memory.wire_loaded([1_000])
    mlx_memory.unwire()
    assert asked == []


MB = 1024 * 1024


@pytest.mark.parametrize("content", [None, "", "12", "a b"])
def test_a_system_that_does_not_say_counts_nothing(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "statm"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(system_state, "_STATM", path)
    assert process_bytes() == 0


def test_macos_tells_the_footprint_of_this_very_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in writes struct rusage_info_v2, field by field as sys/resource.h has them."""
    fields = "uuid uuid user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size"
    names = [*fields.split(), "resident_size", "phys_footprint", "proc_start_abstime"]
    asked: list[tuple[int, int]] = []

    class Libc:
        def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
            asked.append((pid, flavor))
            words = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint64))
            for index, name in enumerate(names):
                words[index] = 700 * MB if name == "phys_footprint" else index
            return failed

    failed = 0
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    assert process_bytes() == 700 * MB
    assert asked == [(os.getpid(), 2)]
    failed = -1
    assert process_bytes() == 0


def test_what_is_beside_the_arrays_counts_once() -> None:
    sizes = {"process": 1_000, "arrays": 600, "freed": 100}
    use = MemoryUse(*(lambda name=name: sizes[name] for name in sizes))
    assert (use.process_bytes, use.beside_bytes, use.bytes_used()) == (1_000, 300, 900)
    sizes["arrays"] = 200  # what went counts no more, before the system is asked again
    assert use.bytes_used() == 500
    sizes["process"] = 550
    use.measure()
    assert (use.process_bytes, use.beside_bytes, use.bytes_used()) == (550, 250, 450)
    sizes["process"] = 900  # grown, perhaps by what went just now and is not noticed yet
    use.measure()
    assert use.beside_bytes == 250
    for _ in range(MEASURES_MAX):
        use.measure()
    assert use.beside_bytes == 600 and use.overhead == OVERHEAD_MAX
    sizes["process"] = 100  # a GPU's own memory is in no process's
    use.measure()
    assert use.bytes_used() == 200


CHUNK, DEPTH = 128, 1_536


@pytest.mark.parametrize(
    "name",
    by_day(
        ["qwen3", "qwen3_moe", "qwen3_5", "gpt_oss", "gemma3_text", "glm4_moe_lite", "falcon_h1"],
        ["qwen3", "qwen3_5", "glm4_moe_lite"],
    ),
)
def test_a_forward_takes_what_is_estimated(name: str) -> None:
    model = loaded(name)
    engine = Engine(model)
    forward = forward_of(model, PrefillGrid(CHUNK))
    cache = engine.new_cache()
    layers = LayerMap(engine.probe())
    layers.reserve(cache, DEPTH)
    ids = np.random.default_rng(0).integers(5, 200, DEPTH).tolist()
    for at in range(0, DEPTH - CHUNK, CHUNK):
        engine.prefill(cache, ids[at : at + CHUNK])
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    engine.prefill(cache, ids[-CHUNK:])
    peak = mx.get_peak_memory() - held
    assert peak <= forward.bytes_at(DEPTH) <= 2.5 * peak


def test_a_deeper_prompt_takes_more_and_a_short_one_less() -> None:
    forward = ForwardMemory(PrefillGrid(512), 1_000, 48, 10)
    depths = [0, 1, 511, 512, 513, 100_000]
    found = [forward.bytes_at(depth) for depth in depths]
    assert found == sorted(found) and found[0] == 0
    assert found[-1] == 512 * (1_000 + 65_536 * 48) + 655_360, "deeper chunks are shorter"
    deep = forward.bytes_at(300_000)
    assert deep == 256 * (1_000 + 300_000 * 48) + 3_000_000, "and no shorter than 256"


def test_what_metal_fuses_costs_nothing_and_a_head_of_256_does() -> None:
    config = {"hidden_size": 5_120, "num_attention_heads": 24, "head_dim": 256}
    wide = forward_memory(config, PrefillGrid(512), 2, "metal").bytes_at(100_000)
    assert 1.6e9 < wide < 2.6e9, "1.6 GB of scores at 65,536 tokens, and a mask"
    fused = forward_memory(config | {"head_dim": 128}, PrefillGrid(512), 2, "metal")
    assert fused.pair_bytes == 0 and fused.bytes_at(100_000) < 0.3e9
    assert forward_memory(config | {"head_dim": 128}, PrefillGrid(512), 2, "cpu").pair_bytes > 0


@pytest.mark.parametrize("config", [{}, {"hidden_size": "5120"}, {"num_attention_heads": True}])
def test_a_config_of_other_names_counts_as_nothing(config: dict[str, object]) -> None:
    assert forward_memory(config, PrefillGrid(512), 2, "metal").bytes_at(100_000) == 0
