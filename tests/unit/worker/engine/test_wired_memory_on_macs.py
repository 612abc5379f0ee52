"""Holds what is wired of twelve models at real size on every Mac: the weights, and never any KV."""

from pathlib import Path

import pytest

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine import mlx_memory
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import GB, MACS, Mac
from scripts.harness.mac.metal_memory import ResidencySet

CHUNKS = 60


def limit_of(mac: Mac) -> int:
    with FakeMac(mac).installed():
        return mlx_memory.memory_limit(load_settings({}, None))


def has_room(mac: Mac, model: ModelLayout) -> bool:
    return model.weight_bytes + 2 * GB < limit_of(mac)


# Each model on the smallest Mac that has room for it.
HOMES = [(next(mac for mac in MACS if has_room(mac, model)), model) for model in LAYOUTS]


def served(mac: Mac, model: ModelLayout) -> ResidencySet:
    """Return what was wired of a worker's that has loaded a model and served it for a while."""
    worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
    worker.start()
    worker.serve(CHUNKS)
    return worker.fake.memory.residency


@pytest.mark.parametrize(
    ("mac", "model"), HOMES, ids=[f"{mac.memory_gb} GB {model.name}" for mac, model in HOMES]
)
def test_no_kv_is_ever_wired(mac: Mac, model: ModelLayout) -> None:
    residency = served(mac, model)
    assert not residency.entered.get("kv") and not residency.entered.get("forward")
    assert residency.wired_of("weights") >= 0.999 * model.weight_bytes
