"""A text model that mlx-vlm alone knows is loaded without a tower.

That it answers warm as cold is seen in tests/property/warm/test_architectures.py.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.engine import engine as engine_module
from hearth.worker.engine.decode.draft_model_loader import DraftCheckpoint, load_draft_model
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.lora.lora_adapter import applied
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.engine.prefill_lengths import network_of
from hearth.worker.setup import kv_setup
from scripts.harness.architectures import TEXT_OF_MLX_VLM, make_checkpoint
from scripts.harness.lora_files import with_adapters, write_adapter
from tests.helpers.by_day import by_day

# mlx-vlm's own load of a whole DeepSeek V4.1 passes over its engrams, which need a tokenizer.
WHOLE = [name for name in TEXT_OF_MLX_VLM if name != "deepseek_v41"]
ERROR_MAX = 2e-4  # of logits up to 30, in float32


def loaded_as(name: str, directory: Path, **settings: str) -> LoadedModel:
    make_checkpoint(f"mlx_vlm/{name}", directory)
    return load_model(load_settings({"MODEL_PATH": str(directory), **settings}, None))


def drawn(count: int, seed: int = 0) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(5, 3000, count)]


@pytest.mark.parametrize("name", by_day(WHOLE, ("k2_horizon",)))
def test_the_logits_are_those_of_mlx_vlms_whole_model(name: str, tmp_path: Path) -> None:
    from mlx_vlm.utils import load_model as load_whole

    model, ids = loaded_as(name, tmp_path).model, mx.array([drawn(90)])
    whole = load_whole(tmp_path)
    difference = model(ids, model.make_cache()) - whole(ids, cache=model.make_cache()).logits
    assert float(mx.abs(difference).max()) <= ERROR_MAX


def test_a_model_of_mlx_vlm_is_known_as_one_without_a_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_as("k2_horizon", tmp_path)
    assert model.is_of_mlx_vlm and model.vision is None and not model.facts.takes_images
    assert model.facts.cache_layout == "2 x KVCache" and model.facts.vocab_size == 3072
    assert type(network_of(model)).__module__.startswith("mlx_vlm.")
    assert sum(array.nbytes for array in weights_of(model)) == model.facts.weight_bytes
    # Its KV is another's once mlx-vlm is another version, and it is tried whether it batches.
    settings = load_settings({"MODEL_PATH": str(tmp_path)}, None)
    root = kv_setup.cache_root(model, settings)
    later = {"mlx-vlm": "99"}
    monkeypatch.setattr(kv_setup, "version", lambda name: later.get(name) or version(name))
    assert kv_setup.cache_root(model, settings) != root
    tried: list[Any] = []
    monkeypatch.setattr(engine_module, "batches_like_alone", lambda *given: tried.append(given))
    Engine(model)
    assert len(tried) == 1


def test_an_adapter_is_taken_as_of_any_text_model_and_a_vision_models_head_is_not(
    tmp_path: Path,
) -> None:
    model, ids = loaded_as("qwen3_5_text", tmp_path / "model"), mx.array([drawn(20)])
    adapted = with_adapters(model, one=write_adapter(tmp_path / "one", model, 1))
    plain = model.model(ids)
    with applied(adapted.adapters.of("one")):
        assert float(mx.abs(model.model(ids) - plain).max()) > ERROR_MAX
    head = DraftCheckpoint("head", tmp_path, "qwen3_5_mtp", 0)
    with pytest.raises(StartError, match=r"\(qwen3_5_text\), a model of text alone"):
        load_draft_model(head, model, lambda _layer: None)


def test_weights_of_16_bits_are_computed_in_float32_on_a_cpu(tmp_path: Path) -> None:
    make_checkpoint("mlx_vlm/k2_horizon", tmp_path)
    weights = tmp_path / "model.safetensors"
    halves = {
        name: array.astype(mx.bfloat16) for name, array in dict(mx.load(str(weights))).items()
    }
    mx.save_safetensors(str(weights), halves)
    model = load_model(load_settings({"MODEL_PATH": str(tmp_path)}, None))
    if model.facts.backend == "cpu":
        assert {array.dtype for array in weights_of(model)} == {mx.float32}
