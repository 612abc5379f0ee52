"""Checks which checkpoints take images, and which of their parts are loaded."""

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.engine import model_loader as model_module
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.vision.vlm_loader import has_tower, sees_images
from scripts.fixtures.fixture_cache import PROJECT_DIR, VISION_NAMES, fixture_dir, mlx_environment
from scripts.harness.socketless_worker import loaded
from tests.helpers.by_day import by_day


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a model that sees images, to be spoiled."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(fixture_dir("gemma3"), directory)
    assert sees_images(directory)
    return directory


def load(directory: Path) -> LoadedModel:
    return load_model(load_settings({"MODEL_PATH": str(directory)}, None))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop_tower(directory: Path) -> None:
    """Leave the weights that mlx-lm's conversion keeps."""
    path = directory / "model.safetensors"
    weights = mx.load(str(path))
    kept = {name: array for name, array in weights.items() if name.startswith("language_model")}
    mx.eval(kept)
    path.unlink()
    mx.save_safetensors(str(path), kept)


@pytest.mark.parametrize("name", by_day(VISION_NAMES))
def test_a_checkpoint_with_a_tower_is_loaded_with_it(name: str) -> None:
    model = loaded(name)
    assert model.vision is not None
    assert isinstance(model.tokenizer, TokenizerWrapper) and model.tokenizer.chat_template
    assert {3053, 3055} <= model.tokenizer.eos_token_ids
    size = sum(path.stat().st_size for path in fixture_dir(name).glob("*.safetensors"))
    assert model.facts.weight_bytes == pytest.approx(size, rel=0.02), "the tower's too"
    assert model.facts.vocab_size == 3072 and model.facts.context_tokens == 131072


def test_a_conversion_that_dropped_the_tower_is_loaded_for_text(checkpoint: Path) -> None:
    drop_tower(checkpoint)
    assert not sees_images(checkpoint)
    model = load(checkpoint)
    assert model.vision is None
    assert model.model.__module__.startswith("mlx_lm.")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: change(path / "config.json", vision_config=None),
        lambda path: change(path / "config.json", model_type="nobody_knows"),
        lambda path: [file.unlink() for file in path.glob("*processor_config.json")],
        lambda path: (path / "config.json").write_text("{"),
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 99),
        lambda path: (path / "model.safetensors").write_bytes(b"\x09" + bytes(7) + b"not json!"),
    ],
    ids=["no tower told", "unknown", "no processor", "broken", "no header", "no JSON"],
)
def test_a_checkpoint_that_lacks_what_images_take_sees_none(checkpoint: Path, spoil: Any) -> None:
    spoil(checkpoint)
    assert not sees_images(checkpoint)


def test_the_index_of_many_files_tells_of_the_tower(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"language_model.lm_head.weight": "a"}}))
    assert not sees_images(checkpoint)
    index.write_text(json.dumps({"weight_map": {"model.visual.merger.norm.weight": "a"}}))
    assert sees_images(checkpoint)


def test_the_processors_chat_template_stands_in_where_the_tokenizer_has_none(
    checkpoint: Path,
) -> None:
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert load(checkpoint).tokenizer.chat_template != "of a processor"
    (checkpoint / "chat_template.jinja").unlink()
    change(checkpoint / "tokenizer_config.json", chat_template=None)
    tokenizer = load(checkpoint).tokenizer
    assert tokenizer.chat_template == "of a processor" and tokenizer.has_chat_template


def test_what_a_processor_reads_is_fetched_from_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(source: str, allow_patterns: list[str]) -> str:
        for path in fixture_dir("qwen2_5_vl").iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(model_module, "snapshot_download", download)
    model = load_model(load_settings({"MODEL_PATH": "someone/vision"}, None))
    assert model.vision is not None and model.facts.path == "someone/vision"
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in fixture_dir("qwen2_5_vl").iterdir()
    }


def test_a_model_file_that_the_look_misses_does_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "ran"
    (checkpoint / "evil.py").write_text(f"open({str(proof)!r}, 'w')")
    change(checkpoint / "config.json", model_file="evil.py")
    monkeypatch.setattr(model_module, "remote_code", lambda directory: [])
    with pytest.raises(StartError, match="names a model_file"):
        load(checkpoint)
    assert not proof.exists()


def test_a_tower_that_cannot_be_loaded_is_said_in_one_line(checkpoint: Path) -> None:
    change(checkpoint / "config.json", vision_config={"model_type": "of another kind"})
    with pytest.raises(StartError, match="which cannot be loaded") as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_vision(monkeypatch: pytest.MonkeyPatch) -> None:
    """An install without the extra 'vision'."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)


def test_without_mlx_vlm_a_vision_model_is_served_for_text_and_the_log_says_so(
    checkpoint: Path, no_vision: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert has_tower(checkpoint) and not sees_images(checkpoint)
    model = load(checkpoint)
    assert model.vision is None and not model.facts.takes_images
    assert model.model.__module__.startswith("mlx_lm.")
    assert "images are refused: to serve this vision model with them, install" in caplog.text
    assert "--vision" in caplog.text and "pip install '.[vision]'" in caplog.text


def test_without_mlx_vlm_a_vision_model_that_mlx_lm_cannot_load_names_the_extra(
    checkpoint: Path, no_vision: None
) -> None:
    change(checkpoint / "config.json", text_config={})
    with pytest.raises(StartError, match="which cannot be loaded: ") as caught:
        load(checkpoint)
    assert "It is a vision model: install the extra 'vision'" in str(caught.value)
    assert "\n" not in str(caught.value)


def imported(code: str) -> set[str]:
    """Return which of the heavy packages a fresh process holds after `code`."""
    report = "print(*(n for n in ('torch', 'torchvision', 'mlx_vlm') if n in sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{report}"],
        cwd=PROJECT_DIR,
        env=mlx_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ran.stdout.split())


@pytest.mark.night
def test_text_takes_no_mlx_vlm_and_images_take_no_torch() -> None:
    code = "from scripts.harness.socketless_worker import loaded\nloaded({!r}, tiny={})"
    assert imported(code.format("qwen3", True)) == set()
    encoding = (
        "from tests.helpers.models.vision_engine import *\n"
        "engine = new_engine('qwen3_vl')\n"
        "engine.vision.encode(picture('qwen3_vl', 1))"
    )
    assert imported(encoding) == {"mlx_vlm"}
