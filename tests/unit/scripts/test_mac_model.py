"""Holds the model of a Mac to what owners of Macs published and to what MLX's sources say."""

import random

import pytest

from scripts.harness.mac.mac_hardware import GB, MB, Mac
from scripts.harness.mac.metal_memory import HEAP_BYTES, Buffer, MetalMemory

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
