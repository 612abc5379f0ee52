"""Checks by what a server's model is known: its source, whatever clients call it."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.models_in_use import is_in_use, sources_in_use
from hearth.commands.models.remove_model import remove
from hearth.proxy.request.model_names import sources_of
from hearth.proxy.workers.pid_file import PidFile
from hearth.shared.settings import load_settings

HUB_ID = "mlx-community/Qwen3.5-9B-MLX-4bit"  # an alias of the catalogue stands for it


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the snapshot of a whole model in a hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = folder / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(8))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    return snapshot


def serving(run_dir: Path, **environ: str) -> PidFile:
    """Have a server's pid file there, of a server that runs: this process."""
    settings = load_settings({"RUN_DIR": str(run_dir), "PROXY_PORT": "4007", **environ}, None)
    settings.instance_dir.mkdir(parents=True)
    file = PidFile(settings.instance_dir, "127.0.0.1", 4007, sources_of(settings))
    file.write([])
    return file


SNAPSHOT = "the snapshot's path"


@pytest.mark.parametrize(
    "environ",
    [
        {"MODEL_PATH": HUB_ID, "PROXY_MODEL_ID": "house-model"},
        {"MODEL_PATH": HUB_ID.upper()},
        {"MODEL_PATH": "qwen3.5-9b"},
        {"MODEL_PATH": "Qwen3.5-9B-MLX-4bit"},
        {"MODEL_PATH": SNAPSHOT},
        {"MODELS": f"fast={HUB_ID}"},
        {"DRAFT_MODEL": HUB_ID},
        {"EMBEDDING_MODEL": HUB_ID},
        {"RERANK_MODEL": HUB_ID},
        {"ADAPTERS": f"mine={HUB_ID}"},
    ],
)
def test_a_model_that_a_server_has_by_any_name_is_in_use_and_not_removed(
    cache: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    environ = {name: str(cache) if text == SNAPSHOT else text for name, text in environ.items()}
    pid_file = serving(tmp_path / "run", **environ)
    settings = load_settings({"RUN_DIR": str(tmp_path / "run")}, None)  # of another port
    assert is_in_use(sources_in_use(settings.run_dir), cache, HUB_ID)
    with pytest.raises(ModelError, match="is being served"):
        remove(HUB_ID, settings, is_sure=True)
    pid_file.remove()
    assert sources_in_use(settings.run_dir) == []
    assert remove(HUB_ID, settings, is_sure=True) == 0
    assert not cache.exists()


def test_another_model_is_not_in_use(cache: Path, tmp_path: Path) -> None:
    serving(tmp_path / "run", MODEL_PATH=f"{HUB_ID}-of-somebody-else")
    assert not is_in_use(sources_in_use(tmp_path / "run"), cache, HUB_ID)


@pytest.mark.parametrize("left", ["blobs", "snapshots/abc/model.safetensors", "refs/main"])
def test_what_a_killed_pull_or_removal_left_is_removed(
    cache: Path, tmp_path: Path, left: str
) -> None:
    folder = cache.parents[1]
    for part in ("refs/main", "snapshots/abc/config.json", "snapshots/abc/model.safetensors"):
        if part != left:
            (folder / part).unlink()
    (folder / "blobs").mkdir()
    (folder / "blobs/abc.incomplete").write_bytes(bytes(100))
    assert (
        remove(HUB_ID.lower(), load_settings({"RUN_DIR": str(tmp_path)}, None), is_sure=True) == 0
    )
    assert not folder.exists()
