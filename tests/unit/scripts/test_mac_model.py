"""Holds the model of a Mac to what owners of Macs published and to what MLX's sources say."""

import pytest

from scripts.harness.mac.mac_hardware import GB, Mac


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
