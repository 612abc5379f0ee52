"""Checks that a model which is not there is told before anything is started."""

from pathlib import Path

import pytest

from hearth.commands import check
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.models.model_path import (
    MODELS_DIR_VARIABLE,
    SMOLLM2,
    ModelMissing,
    check_model,
    named_model,
)


def checkpoint(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_text("{}")
    return directory


def test_a_model_is_named_as_a_directory_or_a_hub_id(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, "config.json", "model.safetensors")
    assert named_model(str(whole)) == whole
    assert named_model("owner/name") == "owner/name"
    assert check_model(str(whole)) == f"{whole}, a directory"
    assert check_model("owner/name").startswith("owner/name, which the first start fetches")


def test_a_builtin_model_is_its_directory_or_else_missing_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(ModelMissing, match=r"Fetch it: hearth pull smollm2 .* --from FILE"):
        check_model("builtin:smollm2")
    SMOLLM2.directory.mkdir()
    whole = checkpoint(SMOLLM2.directory, "config.json", "model.safetensors")
    assert whole.parent == tmp_path
    for source in ("builtin:smollm2", "smollm2", "SmolLM2:latest"):
        assert named_model(source) == whole


@pytest.mark.parametrize("source", ["/does/not/exist", "./x", "~/x-y-z", "name", "a/b/c"])
def test_a_path_that_leads_nowhere_is_no_hub_id(source: str) -> None:
    with pytest.raises(StartError, match="neither a directory nor a hub id"):
        check_model(source)


def test_a_directory_that_lacks_a_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"without a config\.json"):
        check_model(str(tmp_path))
    checkpoint(tmp_path, "config.json", "model.gguf")
    with pytest.raises(StartError, match=r"without \*\.safetensors files"):
        check_model(str(tmp_path))


def test_a_check_refuses_a_model_of_a_type_that_no_worker_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", "")
    whole = checkpoint(tmp_path, "config.json", "model.safetensors")
    (whole / "config.json").write_text('{"model_type": "llada2_moe"}')
    assert check.main(["--model", str(whole)]) == EXIT_CANNOT_START
    assert "cannot be loaded: its type 'llada2_moe'" in capsys.readouterr().err


def test_a_check_of_a_draft_model_that_is_not_there_names_its_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", "")
    monkeypatch.setenv("DRAFT_MODEL", "/no/head")
    whole = checkpoint(tmp_path, "config.json", "model.safetensors")
    assert check.main(["--model", str(whole)]) == EXIT_CANNOT_START
    assert "DRAFT_MODEL is '/no/head', which is neither" in capsys.readouterr().err
