"""The settings make a process that waits to be asked, or refuse to start with the remedy."""

from pathlib import Path

import pytest

from hearth.proxy.embeddings.process_setup import embedding_process
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.shared.errors import StartError
from hearth.shared.models import builtin_models
from hearth.shared.models.builtin_models import MODELS_DIR_VARIABLE
from hearth.shared.settings_from_env import load_settings
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint


def test_without_either_model_there_is_no_process() -> None:
    assert embedding_process(load_settings({}, None), {}, WorkerPool()) is None


@pytest.mark.parametrize("setting", ["EMBEDDING_MODEL", "RERANK_MODEL"])
def test_a_model_makes_a_process_that_has_not_begun(setting: str) -> None:
    settings = load_settings({setting: str(embedding_checkpoint("bert"))}, None)
    process = embedding_process(settings, {}, WorkerPool())
    assert process is not None
    assert (process.facts()["state"], process.pid) == ("unloaded", None)


def test_a_builtin_model_that_is_not_here_yet_is_told_and_does_not_refuse_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MODELS_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(builtin_models, "local_models", list)
    settings = load_settings({"EMBEDDING_MODEL": "builtin:minilm"}, None)
    process = embedding_process(settings, {}, WorkerPool())
    assert process is not None and process.facts()["state"] == "unloaded"
    assert "Fetch it: hearth pull minilm" in caplog.text
    with pytest.raises(StartError, match="the builtin models are "):
        embedding_process(load_settings({"EMBEDDING_MODEL": "builtin:no"}, None), {}, WorkerPool())


@pytest.mark.parametrize("setting", ["EMBEDDING_MODEL", "RERANK_MODEL"])
def test_what_is_no_model_refuses_to_start_and_names_the_setting(
    setting: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for source in ("/does/not/exist", "no-such-name", str(tmp_path), str(tmp_path.parent)):
        settings = load_settings({setting: source}, None)
        with pytest.raises(StartError, match=f"^{setting} is '{source}'"):
            embedding_process(settings, {}, WorkerPool())
