"""Holds what is foretold of one rank's part to what mlx-lm leaves of a model that it splits."""

import json
import shutil
from pathlib import Path

import pytest

from hearth.shared.settings_from_env import Settings, load_settings
from hearth.worker.verdict.memory_verdict import MemoryVerdict, memory_verdict, ranks_here
from scripts.fixtures.fixture_cache import fixture_dir

WEIGHTS = 40 << 30
GB_MB = 1024


def settings_of(ranks: int, **more: str) -> Settings:
    told = {"RANKS": str(ranks), "MEMORY_LIMIT_MB": str(32 * GB_MB), "MAX_KV_SIZE_GB": "0"}
    return load_settings({**told, **more}, None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose weights are not there, and are nearly all in layers that are split."""
    source, target = fixture_dir("qwen3", ranked=True), tmp_path_factory.mktemp("model")
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    told = config | {"intermediate_size": 384 * 64, "num_hidden_layers": 8, "vocab_size": 512}
    (target / "config.json").write_text(json.dumps(told))
    return target


def hosts_file(directory: Path) -> str:
    path = directory / "hosts.json"
    path.write_text(json.dumps([{"ips": ["192.168.2.1"]}, {"ips": ["192.168.2.2"]}]))
    return str(path)


def verdict(directory: Path, ranks: int, **more: str) -> MemoryVerdict:
    return memory_verdict(directory, settings_of(ranks, **more), WEIGHTS)


def test_a_model_that_fits_only_when_two_machines_share_it_fits(
    directory: Path, tmp_path: Path
) -> None:
    assert not verdict(directory, 1).fits
    assert not verdict(directory, 2).fits, "both parts are on this machine"
    shared = verdict(directory, 2, RANK_HOSTS=hosts_file(tmp_path))
    assert shared.fits and not shared.unknown
    assert WEIGHTS / 2 < shared.weight_bytes < 0.51 * WEIGHTS
    assert shared.limit == 32 << 30


def test_each_of_two_ranks_keeps_half_of_the_kv(directory: Path) -> None:
    whole, part = (verdict(directory, ranks, MEMORY_LIMIT_MB="90000") for ranks in (1, 2))
    assert whole.kv_bytes is not None and part.kv_bytes is not None
    assert part.kv_bytes(1000) == pytest.approx(whole.kv_bytes(1000) / 2, rel=0.02)
    assert part.limit == whole.limit // 2


def test_what_cannot_be_split_so_is_said(directory: Path) -> None:
    assert "num_attention_heads=12" in verdict(directory, 5).unknown
    assert "no pipeline" in verdict(directory, 2, RANK_SPLIT="pipeline").unknown


def test_ranks_elsewhere_take_nothing_of_this_machine(tmp_path: Path) -> None:
    assert ranks_here(settings_of(2)) == 2
    assert ranks_here(settings_of(2, RANK_HOSTS=hosts_file(tmp_path))) == 1
