"""Holds the model of a Mac to what owners of Macs published and to what MLX's sources say."""

import random

import pytest

from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout
from scripts.harness.mac.mac_hardware import GB, MACS, MB, PAGE, Mac
from scripts.harness.mac.metal_memory import HEAP_BYTES, Buffer, MetalMemory, ResidencySet, load

MINI = Mac("M4", 24)


@pytest.mark.parametrize(
    ("mac", "architecture", "recommended", "buffer"),
    [
        (Mac("M1", 16, macos=13), "applegpu_g13g", 11_453_251_584, 8_589_934_592),
        (Mac("M2 Max", 32), "applegpu_g14s", 26_800_603_136, 20_100_448_256),
        (Mac("M4 Pro", 24), "applegpu_g16s", 19_069_665_280, None),
        (Mac("M4 Pro", 48), "applegpu_g16s", 40_200_896_512, 30_150_672_384),
        (Mac("M5 Max", 64), "applegpu_g17s", 55_662_788_608, 41_747_087_360),
        (Mac("M5 Max", 64, wired_limit_mb=57_344), "applegpu_g17s", 60_129_542_144, 41_747_087_360),
        (Mac("M5 Max", 128), "applegpu_g17s", 115_448_725_504, 86_586_540_032),
    ],
)
def test_a_mac_tells_what_its_owners_published(
    mac: Mac, architecture: str, recommended: int, buffer: int | None
) -> None:
    info = mac.device_info()
    assert info["architecture"] == architecture
    assert info["memory_size"] == mac.memory_gb * GB
    assert info["max_recommended_working_set_size"] == recommended
    assert buffer is None or info["max_buffer_length"] == buffer


def test_the_macs_have_every_size_of_memory_and_every_generation_of_chip() -> None:
    assert [mac.memory_gb for mac in MACS] == [8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512]
    assert {mac.chip.split()[0] for mac in MACS} == {"M1", "M2", "M3", "M4", "M5"}
    assert {mac.architecture[-1] for mac in MACS} == set("gsd")
    assert all(mac.recommended_bytes < mac.memory_bytes for mac in MACS)


def test_nothing_is_wired_before_a_limit_is_set_nor_before_macos_15() -> None:
    memory = MetalMemory(MINI)
    load(memory, [GB, GB])
    assert memory.residency.wired_bytes == 0
    old = MetalMemory(Mac("M1", 16, macos=14))
    old.set_wired_limit(4 * GB)
    load(old, [GB, GB])
    assert old.residency.wired_bytes == 0


def test_what_comes_first_is_wired_and_what_does_not_fit_is_left_out_until_there_is_room() -> None:
    memory = MetalMemory(MINI)
    memory.set_wired_limit(2 * GB + HEAP_BYTES)
    first, *_ = load(memory, [GB, GB, GB])
    assert memory.residency.wired_bytes == 2 * GB + HEAP_BYTES
    memory.free(first)
    assert memory.residency.wired_bytes == 2 * GB + HEAP_BYTES, "a cached buffer stays wired"
    memory.clear_cache()
    assert memory.residency.wired_bytes == GB + HEAP_BYTES, "what was left out does not come in"
    memory.set_wired_limit(3 * GB)
    assert memory.residency.wired_of("weights") == 2 * GB
    memory.set_wired_limit(0)
    assert memory.residency.wired_bytes == 0


def test_an_array_takes_whole_pages_of_what_is_wired_and_a_tiny_one_the_heap() -> None:
    memory = MetalMemory(MINI)
    memory.set_wired_limit(GB)
    load(memory, [PAGE + 1, 300, 200])
    assert memory.residency.wired_of("weights") == 3 * PAGE
    assert memory.active_bytes == 2 * PAGE + 300 + 200


def test_a_freed_buffer_serves_the_next_array_of_about_its_size() -> None:
    memory = MetalMemory(MINI)
    (one,) = load(memory, [10 * PAGE])
    memory.free(one)
    assert memory.malloc(9 * PAGE, "kv") is one and memory.cached_bytes == 0
    memory.free(one)
    assert memory.malloc(11 * PAGE, "kv") is not one and memory.cached_bytes == 10 * PAGE


def test_more_than_is_recommended_cannot_be_wired() -> None:
    memory = MetalMemory(MINI)
    memory.set_wired_limit(MINI.recommended_bytes)
    with pytest.raises(ValueError, match="maximum working set"):
        memory.set_wired_limit(MINI.recommended_bytes + 1)


def test_the_cache_is_released_before_active_memory_meets_the_limit() -> None:
    memory = MetalMemory(MINI)
    memory.set_limit(4 * GB)
    for buffer in load(memory, [GB, GB]):
        memory.free(buffer)
    assert memory.cached_bytes == 2 * GB
    memory.malloc(3 * GB)
    assert memory.cached_bytes <= GB and memory.active_bytes == 3 * GB


def test_bytes_are_conserved_whatever_is_allocated_freed_or_resized() -> None:
    chance = random.Random(5)
    memory = MetalMemory(MINI, chance)
    alive: list[Buffer] = []
    for _ in range(2_000):
        what = chance.random()
        if what < 0.5 or not alive:
            alive.append(memory.malloc(chance.randrange(1, 40 * MB), chance.choice(["kv", "w"])))
        elif what < 0.9:
            memory.free(alive.pop(chance.randrange(len(alive))))
        elif what < 0.95:
            memory.set_wired_limit(chance.randrange(GB))
        else:
            memory.clear_cache()
        assert memory.active_bytes == sum(buffer.length for buffer in alive)
        assert memory.residency.wired_bytes <= max(memory.wired_limit, 0)
    memory.clear_cache()
    heap = HEAP_BYTES * (memory.residency.wired_of("heap") > 0)
    wired = sum(b.allocated_bytes for b in alive if b.is_wired)
    assert memory.residency.wired_bytes == heap + wired


def test_a_set_that_is_switched_off_counts_nothing() -> None:
    off = ResidencySet(is_enabled=False)
    off.resize(GB)
    off.insert(Buffer(PAGE, "kv"))
    assert (off.wired_bytes, off.entered) == (0, {})


@pytest.mark.parametrize("model", LAYOUTS, ids=lambda model: model.name)
def test_a_models_arrays_are_its_weights(model: ModelLayout) -> None:
    assert sum(model.weights()) == pytest.approx(model.weight_bytes, rel=0.001)
