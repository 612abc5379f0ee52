"""A checkpoint that brings its own code does not run it, unless the user named that checkpoint."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.engine import model_loader as model_module
from hearth.worker.engine.model_loader import LoadedModel, load_model, remote_code
from scripts.fixtures.fixture_cache import fixture_dir

MODEL_CODE = """
from pathlib import Path
Path({proof!r}).write_text("model code ran")
from mlx_lm.models.qwen3 import Model, ModelArgs
"""
TOKENIZER_CODE = """
from pathlib import Path
Path({proof!r}).write_text("tokenizer code ran")
from transformers import PreTrainedTokenizerFast
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a model that works, to be spoiled."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(fixture_dir("qwen3", tiny=True), directory)
    assert remote_code(directory) == []
    return directory


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that the checkpoint's code makes when it runs."""
    return tmp_path / "ran"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_model_file(checkpoint: Path, proof: Path, name: str = "evil.py") -> None:
    (checkpoint / name).write_text(MODEL_CODE.format(proof=str(proof)))
    change(checkpoint / "config.json", model_file=name)


def with_tokenizer_code(checkpoint: Path, proof: Path) -> None:
    (checkpoint / "evil_tok.py").write_text(TOKENIZER_CODE.format(proof=str(proof)))
    auto_map = {"AutoTokenizer": ["evil_tok.EvilTokenizer", "evil_tok.EvilTokenizer"]}
    change(checkpoint / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="EvilTokenizer")


def loaded(model_path: str, **environ: str) -> LoadedModel:
    return load_model(load_settings({"MODEL_PATH": model_path, **environ}, None))


def refusal(model_path: str, **environ: str) -> str:
    with pytest.raises(StartError) as caught:
        loaded(model_path, **environ)
    return str(caught.value)


@pytest.mark.parametrize("spoil", [with_model_file, with_tokenizer_code])
def test_code_in_a_checkpoint_is_refused_and_creates_no_file(
    checkpoint: Path, proof: Path, spoil: Any
) -> None:
    spoil(checkpoint, proof)
    text = refusal(str(checkpoint))
    assert f"ALLOW_MODEL_CODE={checkpoint}" in text and "evil" in text
    assert not proof.exists()


@pytest.mark.parametrize("spoil", [with_model_file, with_tokenizer_code])
def test_code_that_the_look_misses_is_not_trusted_by_the_loaders_either(
    checkpoint: Path, proof: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "remote_code", lambda directory: [])
    spoil(checkpoint, proof)
    with contextlib.suppress(StartError):  # another tokenizer may stand in
        loaded(str(checkpoint))
    assert not proof.exists()


@pytest.mark.parametrize("spoil", [with_model_file, with_tokenizer_code])
def test_the_same_code_runs_where_the_user_named_the_checkpoint(
    checkpoint: Path, proof: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control: what the refusal holds back would have run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    spoil(checkpoint, proof)
    loaded(str(checkpoint), ALLOW_MODEL_CODE=f"other/model, {checkpoint}/")
    assert "code ran" in proof.read_text()


@pytest.mark.parametrize("name", ["checkpoint", "*", "true", "/", "..", "other/checkpoint"])
def test_allowing_another_name_allows_nothing(checkpoint: Path, proof: Path, name: str) -> None:
    with_model_file(checkpoint, proof)
    assert "brings code of its own" in refusal(str(checkpoint), ALLOW_MODEL_CODE=name)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        *(
            ("config.json", {"model_file": place}, "model_file in config.json")
            for place in ("../evil.py", "sub/evil.py", "/tmp/evil.py", "evil.txt")
        ),
        *(
            # Also a nested one, of another repository.
            (name, {"text_config": {"auto_map": {"AutoConfig": "someone/else--x.Y"}}}, "auto_map")
            for name in (
                *("config.json", "tokenizer_config.json", "processor_config.json"),
                *("preprocessor_config.json", "video_preprocessor_config.json"),
            )
        ),
        # Python beside the weights, though nothing names it.
        *((name, {}, name) for name in ("modeling_evil.py", "evil.PY", "evil.\uff50\uff59")),
    ],
)
def test_code_is_found_wherever_it_is_named_or_lies(
    checkpoint: Path, file: str, fields: dict[str, Any], said: str
) -> None:
    path = checkpoint / file
    if not path.exists():
        path.write_text("{}")
    change(path, **fields)
    text = refusal(str(checkpoint))
    assert said in text and file in text


@pytest.mark.parametrize("name", ["Config.json", "CONFIG.JSON", "con\ufb01g.json"])
def test_a_configuration_by_another_spelling_is_looked_at(checkpoint: Path, name: str) -> None:
    change(checkpoint / "config.json", model_file="evil")
    (checkpoint / "config.json").rename(checkpoint / name)
    assert remote_code(checkpoint) == [f"model_file in {name}"]


def test_names_that_say_nothing_are_no_code(checkpoint: Path) -> None:
    change(checkpoint / "config.json", model_file=None, auto_map={})
    (checkpoint / "chat_config.json").write_text('{"note": "auto_map", "x": ["model_file"]}')
    (checkpoint / "broken_config.json").write_text('{"auto_map": ')
    assert remote_code(checkpoint) == []
    assert loaded(str(checkpoint)).facts.architecture == "qwen3"


def test_code_on_a_hub_is_refused_before_the_weights_are_fetched(
    checkpoint: Path, proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(source: str, allow_patterns: list[str]) -> str:
        assert source == "someone/model"
        asked.append(allow_patterns)
        return str(checkpoint)

    monkeypatch.setattr(model_module, "snapshot_download", download)
    assert loaded("someone/model").facts.path == "someone/model"
    assert len(asked) == 2 and any("safetensors" in pattern for pattern in asked[1])
    assert not any("py" in pattern for patterns in asked for pattern in patterns)
    asked.clear()
    with_model_file(checkpoint, proof)
    assert "ALLOW_MODEL_CODE=someone/model" in refusal("someone/model")
    assert len(asked) == 1 and not any("safetensors" in pattern for pattern in asked[0])
    assert not proof.exists()


def test_code_that_appears_on_a_hub_between_the_look_and_the_load_is_refused(
    checkpoint: Path, proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(source: str, allow_patterns: list[str]) -> str:
        if any("safetensors" in pattern for pattern in allow_patterns):
            with_model_file(checkpoint, proof)
        return str(checkpoint)

    monkeypatch.setattr(model_module, "snapshot_download", download)
    assert "brings code of its own" in refusal("someone/model")
    assert not proof.exists()
