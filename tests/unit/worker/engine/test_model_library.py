"""A checkpoint's type says which library loads it, or is refused with the reason."""

import json
import pkgutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.engine import model_loader
from hearth.worker.engine.model_library import LAYERS_MAX, library_of
from hearth.worker.engine.model_loader import load_model
from scripts.harness.architectures import TEXT_OF_MLX_VLM, configuration


def config_of(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def refusal(directory: Path, **config: Any) -> str:
    """Return why a checkpoint is not loaded. It has no weights, which would be missed first."""
    config_of(directory, **config)
    with pytest.raises(StartError) as caught:
        load_model(load_settings({"MODEL_PATH": str(directory)}, None))
    text = str(caught.value)
    assert "which cannot be loaded: its " in text and "\n" not in text
    return text


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "kimi_k2", "olmo2", "minimax_m3_vl"])
def test_mlx_lm_comes_first(name: str, tmp_path: Path) -> None:
    assert library_of(config_of(tmp_path, model_type=name)) == "mlx-lm"


def test_mlx_vlm_loads_what_mlx_lm_lacks(tmp_path: Path) -> None:
    for name in TEXT_OF_MLX_VLM:
        config = config_of(tmp_path, **configuration(f"mlx_vlm/{name}"))
        assert library_of(config) == "mlx-vlm", name
    causal = config_of(tmp_path, model_type="hrm_text", prefix_lm=False)
    assert library_of(causal) == "mlx-vlm"


def test_mlx_vlm_loads_a_known_type_with_parts_that_mlx_lm_refuses(tmp_path: Path) -> None:
    name = "deepseek_v41"
    assert library_of(config_of(tmp_path, model_type=name)) == "mlx-lm"
    with_engrams = config_of(tmp_path, model_type=name, engram_layer_ids=[1])
    assert library_of(with_engrams) == "mlx-vlm"


@pytest.mark.parametrize(
    ("config", "kind", "instead"),
    [
        ({"model_type": "llada2_moe"}, "a diffusion model", "use one of these"),
        ({"model_type": "diffusion_gemma"}, "a diffusion model", "mlx-vlm's own server"),
        ({"model_type": "nemotron_labs_diffusion"}, "a diffusion model", "token by token"),
        ({"model_type": "florence2"}, "an encoder-decoder", "docs/clients.md"),
        ({"model_type": "hrm_text"}, "a prefix model", "MODEL_PATH"),
        ({"model_type": "bert"}, "an encoder", "EMBEDDING_MODEL or RERANK_MODEL"),
        ({"model_type": "colqwen2_5"}, "an encoder", "EMBEDDING_MODEL"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
            *("an encoder", "RERANK_MODEL"),
        ),
        ({"model_type": "llada_image"}, "a generator", "mlx_vlm.generate"),
        ({"model_type": "minimax_h3"}, "a generator", "mlx_vlm.generate"),
        ({"model_type": "sam3"}, "a vision encoder", "a chat model"),
        ({"model_type": "yolo11"}, "a vision encoder", "a chat model"),
        ({"model_type": "decider2"}, "a decision model", "mlx_vlm.decide"),
        pytest.param(  # 2 s: it imports what reads sound
            *({"model_type": "nemotron_voicechat"}, "a voice model", "a chat model"),
            marks=pytest.mark.night,
        ),
        ({"model_type": "qwen3_5_mtp"}, "a draft model", "DRAFT_MODEL"),
    ],
)
def test_what_writes_no_text_token_by_token_is_refused_by_what_it_is(
    config: dict[str, Any], kind: str, instead: str, tmp_path: Path
) -> None:
    told = refusal(tmp_path, **config)
    assert f"that of {kind}: " in told and instead in told


def test_a_hubs_model_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(_source: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(config_of(tmp_path, model_type="llada2_moe"))

    monkeypatch.setattr(model_loader, "snapshot_download", download)
    with pytest.raises(StartError, match="a diffusion model"):
        load_model(load_settings({"MODEL_PATH": "someone/diffuses"}, None))
    assert asked == [["*.json"]]


def test_a_type_that_nobody_knows_is_told_with_the_nearest_that_is_served(tmp_path: Path) -> None:
    told = refusal(tmp_path, model_type="hy_v5")
    assert "'hy_v5' is not known to mlx-lm 0." in told and " or mlx-vlm 0." in told
    assert "nearest known type is 'hy_v4'" in told and "Update Hearth" in told
    # The nearest of all would be a diffusion model.
    assert "llada" not in refusal(tmp_path, model_type="llada3_moe").partition("; ")[2]
    for name in ("zzzzzz", "a.b", "cache"):
        assert "nearest" not in refusal(tmp_path, model_type=name)
    assert "names no model_type" in refusal(tmp_path, hidden_size=64)
    broken = refusal(tmp_path, model_type="qwen3", architectures=5)
    assert "its type 'qwen3' cannot be looked up: 'int' object" in broken
    layers = refusal(tmp_path, model_type="qwen3", num_hidden_layers=LAYERS_MAX + 1)
    assert "4,097 layers" in layers


def test_without_mlx_vlm_a_type_that_it_may_know_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    told = refusal(tmp_path, model_type="hy_v4")
    assert "not known to mlx-lm" in told and "install the extra 'vision'" in told
    with_engrams = config_of(tmp_path, model_type="deepseek_v41", engram_layer_ids=[1])
    assert library_of(with_engrams) == "mlx-lm", "which says what it lacks"


REFUSED_TYPES: Final = {  # of mlx-vlm 0.7.10
    "a decision model": 5,
    "a diffusion model": 3,
    "a draft model": 21,
    "a generator": 12,
    "a prefix model": 1,
    "a vision encoder": 12,
    "a voice model": 1,
    "an encoder": 18,
    "an encoder-decoder": 2,
}


@pytest.mark.night
def test_every_type_of_both_libraries_is_served_or_refused_by_what_it_is(tmp_path: Path) -> None:
    import mlx_lm.models
    from mlx_vlm import models
    from mlx_vlm.speculative import drafters

    told: Counter[str] = Counter()
    packages = [each for each in (models, drafters) for each in pkgutil.iter_modules(each.__path__)]
    for name in [each.name for each in packages if each.ispkg]:
        try:
            told[library_of(config_of(tmp_path, model_type=name))] += 1
        except ValueError as error:
            told[str(error).partition("that of ")[2].partition(":")[0]] += 1
    assert told == REFUSED_TYPES | {"mlx-lm": told["mlx-lm"], "mlx-vlm": told["mlx-vlm"]}
    assert told["mlx-lm"] > 100 and told["mlx-vlm"] > 70
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        text = (Path(mlx_lm.models.__path__[0]) / f"{module.name}.py").read_text()
        if "class ModelArgs" in text and module.name != "olmo":  # olmo wants ai2-olmo
            assert library_of(config_of(tmp_path, model_type=module.name)), "not refused"
