"""The memory that is foretold of a model, or of one rank, is what a worker with it then tells."""

import functools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from hearth.shared.models.model_path import catalogued
from hearth.shared.settings import Settings, load_settings
from hearth.worker.cache.extent_store import MB
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import forward_of
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.system_state import MemoryUse
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.memory_verdict import SHORT_TOKENS, MemoryVerdict, memory_verdict, ranks_here
from hearth.worker.setup.kv_setup import cut_rule_of
from hearth.worker.setup.memory_setup import WorkerMemory
from scripts.fixtures.fixture_cache import TEXT_NAMES, VISION_NAMES, fixture_dir
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import layout
from scripts.harness.mac.mac_hardware import MACS
from scripts.harness.socketless_worker import loaded
from tests.helpers.by_day import KINDS

DEPTHS = (1, 300, 5000, 100_000)
BESIDE = 300 * MB
BUILT_S_MAX = 2.0  # a million layers take a minute, and all memory


def settings_of(directory: Path, **more: str) -> Settings:
    return load_settings({"MODEL_PATH": str(directory), "MAX_KV_SIZE_GB": "0", **more}, None)


def config_alone(source: Path, target: Path) -> Path:
    """Return a directory with what is there of a checkpoint before its weights are fetched."""
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    return target


def layers_of(model: LoadedModel) -> LayerMap:
    engine = Engine(model, batches=False)
    with engine.stream():
        return LayerMap(engine.probe())


def slot_bytes(layers: LayerMap, settings: Settings, tokens: int) -> int:
    """Return what a live cache takes whose rows are packed from QUANTIZED_KV_START on."""
    is_packed = settings.kv_bits and tokens >= settings.quantized_kv_start
    form = QuantFormat(settings.kv_bits, settings.kv_group_size) if is_packed else None
    return layers.slot_bytes(tokens, form)


# In bfloat16 those alone that MLX computes on a CPU; a conversion leaves some of theirs as float32.
FIXTURES = [
    *((name, "float32") for name in (*TEXT_NAMES, *VISION_NAMES)),
    *((name, "bfloat16") for name in ("qwen3", "qwen3_5", "falcon_h1", "qwen3_5_vl")),
]
BY_DAY = [
    pytest.param(*each, marks=() if each[0] in KINDS else pytest.mark.night) for each in FIXTURES
]


@pytest.mark.parametrize(("name", "dtype"), BY_DAY)
@pytest.mark.parametrize("kv_bits", [0, 8])
def test_the_config_alone_tells_the_kv_and_the_forwards_of_a_loaded_model(
    name: str, dtype: str, kv_bits: int, tmp_path: Path
) -> None:
    source = fixture_dir(name, dtype)
    settings = settings_of(source, KV_BITS=str(kv_bits or "off"))
    model = load_model(settings)
    layers, forward = layers_of(model), forward_of(model, cut_rule_of(model, settings).grid)
    for directory in (source, config_alone(source, tmp_path)):
        # As large as nothing is beside it, so that no overhead is added.
        verdict = memory_verdict(directory, settings, model.facts.weight_bytes, 0)
        assert verdict.kv_bytes is not None and verdict.forward_bytes is not None, verdict.unknown
        kv_bytes = [slot_bytes(layers, settings, tokens) for tokens in DEPTHS]
        assert list(map(verdict.kv_bytes, DEPTHS)) == kv_bytes
        assert list(map(verdict.forward_bytes, DEPTHS)) == list(map(forward.bytes_at, DEPTHS))
        assert verdict.context_tokens == model.facts.context_tokens


class FixedUse(MemoryUse):
    """What a process would take with BESIDE bytes beside its weights."""

    def __init__(self, weight_bytes: int) -> None:
        super().__init__(lambda: weight_bytes + BESIDE, lambda: weight_bytes, lambda: 0)


@hypothesis_settings(max_examples=30, deadline=None)
@given(limit_mb=st.integers(330, 700), workers=st.integers(1, 3), bits=st.sampled_from([0, 8]))
def test_the_context_that_is_foretold_is_the_one_that_a_worker_tells(
    limit_mb: int, workers: int, bits: int
) -> None:
    model = loaded("qwen3", tiny=True)
    weights = model.facts.weight_bytes
    more = {"MEMORY_LIMIT_MB": str(limit_mb * workers), "WORKERS": str(workers)}
    settings = settings_of(model.directory, KV_BITS=str(bits or "off"), **more)
    verdict = memory_verdict(model.directory, settings, weights, BESIDE)
    memory = WorkerMemory(settings, "ipc:///nowhere/w")
    memory.share.own_bytes = weights
    memory.use = FixedUse(weights)
    layers = layers_of(model)
    forward = forward_of(model, cut_rule_of(model, settings).grid)
    kv_bytes = functools.partial(slot_bytes, layers, settings)
    fitted = memory.fit(model, kv_bytes, forward).facts
    assert verdict.context_tokens == fitted.context_tokens
    assert verdict.context_by == fitted.context_by


def test_a_model_far_larger_than_this_machine_is_asked_without_its_weights(tmp_path: Path) -> None:
    config = json.loads((fixture_dir("qwen3") / "config.json").read_text())
    config |= {"num_hidden_layers": 80, "hidden_size": 16_384, "intermediate_size": 65_536}
    config |= {"num_attention_heads": 128, "num_key_value_heads": 16, "head_dim": 128}
    config |= {"dtype": "bfloat16", "max_position_embeddings": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    verdict = memory_verdict(tmp_path, settings_of(tmp_path), 300 * 10**9)
    assert mx.get_peak_memory() - before < 64 * MB
    assert verdict.kv_bytes is not None
    assert not verdict.fits
    rows = 131_072 * 80 * 2 * 16 * 128 * 2
    assert rows <= verdict.kv_bytes(131_072) <= rows * 1.01


def test_of_what_mlx_vlm_alone_loads_the_weights_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "k2_horizon"}')
    verdict = memory_verdict(tmp_path, settings_of(tmp_path), 10**6)
    assert "mlx-vlm loads it" in verdict.unknown and verdict.fits and not verdict.refused
    assert verdict.kv_bytes is None and verdict.context_tokens == 0
    assert not memory_verdict(tmp_path, settings_of(tmp_path), 10**15).fits


def test_what_no_library_loads_fits_nowhere_and_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    verdict = memory_verdict(tmp_path, settings_of(tmp_path), 10**6)
    assert "no_such_architecture" in verdict.refused and not verdict.fits


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_config_that_tells_more_layers_than_memory_holds_is_not_built(
    is_nested: bool, tmp_path: Path
) -> None:
    source = fixture_dir("qwen3_5_vl" if is_nested else "qwen3")
    config = json.loads((source / "config.json").read_text())
    (config["text_config"] if is_nested else config)["num_hidden_layers"] = 10**6
    (tmp_path / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    verdict = memory_verdict(tmp_path, settings_of(tmp_path), 10**6)
    assert "1,000,000 layers" in verdict.refused and not verdict.fits
    assert time.monotonic() - began < BUILT_S_MAX


ON_MACS = {
    "qwen3.5-9b": "Qwen3.5-9B",
    "bonsai-2-27b": "Qwen3.5-27B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gemma-4-26b": "Gemma-4-26B-A4B",
    "qwen3.8-27b": "Qwen3.5-27B",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "qwen3.6-35b": "Qwen3.5-35B-A3B",
    "gpt-oss-120b": "gpt-oss-120b",
    "qwen3.8-flash-next": "Qwen3.8-Flash-Next",
    "glm-5.3-flash": "GLM-5.3-Flash",
    "deepseek-v4.1-flash": "DeepSeek-V4.1-Flash",
}


@pytest.mark.parametrize("alias", ON_MACS)
def test_a_recommended_model_has_room_for_a_long_context_on_the_mac_that_is_told(
    alias: str,
) -> None:
    """By the architecture of ON_MACS, with the catalogue's bytes of weights in memory."""
    told = catalogued(alias)
    assert told is not None
    architecture = layout(ON_MACS[alias])
    mac = next(mac for mac in MACS if mac.memory_gb == told.memory_gb)
    times = told.weight_bytes / architecture.weight_bytes
    bits, expert_bits = architecture.bits * times, architecture.expert_bits * times
    model = replace(architecture, bits=bits, expert_bits=expert_bits)
    worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
    worker.start()
    assert worker.context() >= SHORT_TOKENS


WEIGHTS = 40 << 30
GB_MB = 1024


def settings_of_ranks(ranks: int, **more: str) -> Settings:
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
    return memory_verdict(directory, settings_of_ranks(ranks, **more), WEIGHTS)


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
    assert ranks_here(settings_of_ranks(2)) == 2
    assert ranks_here(settings_of_ranks(2, RANK_HOSTS=hosts_file(tmp_path))) == 1
