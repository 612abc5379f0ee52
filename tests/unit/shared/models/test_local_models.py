"""Checks that models are found where the hub's tools, LM Studio and oMLX keep them, by name."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import given, strategies as st

from hearth.shared.errors import StartError
from hearth.shared.models import model_path
from hearth.shared.models.local_models import (
    HUB,
    LM_STUDIO,
    OMLX,
    FoundModel,
    hub_models,
    local_models,
    matching,
)
from hearth.shared.models.model_path import CATALOGUE, catalogued, fitting
from hearth.shared.paths import PROJECT_DIR
from hearth.worker.engine.mlx_memory import default_limit, working_bytes

GB = 1024**3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def checkpoint(directory: Path, *shards: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for shard in shards or ("model.safetensors",):
        (directory / shard).write_bytes(bytes(100))
    return directory


def cached(home: Path, name: str, commit: str = "c1", *, is_main: bool = True) -> Path:
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    if is_main:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs/main").write_text(commit)
    return checkpoint(folder / "snapshots" / commit)


def names(home: Path) -> list[tuple[str, str]]:
    return [(model.name, model.program) for model in local_models(home)]


def test_models_are_found_in_the_cache_and_in_other_programs_folders(home: Path) -> None:
    cached(home, "owner/one--two")
    checkpoint(home / ".lmstudio/models/mlx-community/Three")
    checkpoint(home / ".cache/lm-studio/models/owner/Four")
    checkpoint(home / ".omlx/models/Five")
    checkpoint(home / ".omlx/models/owner/Six")
    (home / "moved").mkdir()
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'moved'}\n")
    checkpoint(home / "moved/models/owner/Seven")
    assert names(home) == [
        ("Five", OMLX),
        ("mlx-community/Three", LM_STUDIO),
        ("owner/Four", LM_STUDIO),
        ("owner/one--two", HUB),
        ("owner/Seven", LM_STUDIO),
        ("owner/Six", OMLX),
    ]


def test_what_is_no_model_for_mlx_is_not_listed(home: Path) -> None:
    gguf = home / ".lmstudio/models/owner/Gguf"
    gguf.mkdir(parents=True)
    (gguf / "model.gguf").write_bytes(b"GGUF")
    (home / "hub/datasets--owner--data/snapshots/c1").mkdir(parents=True)
    (home / "hub/models--owner--empty/snapshots/c1").mkdir(parents=True)
    (home / ".omlx/models").mkdir(parents=True)
    (home / ".omlx/models/note.txt").write_text("hello")
    assert names(home) == []


def test_a_model_lacks_what_its_index_names_or_links_to_nothing(home: Path) -> None:
    directory = checkpoint(home / ".omlx/models/Two", "model-1.safetensors")
    assert local_models(home)[0].is_whole
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not local_models(home)[0].is_whole
    (directory / "model-2.safetensors").symlink_to(home / "gone")
    assert not local_models(home)[0].is_whole
    (home / "gone").write_bytes(bytes(50))
    assert local_models(home)[0].is_whole
    assert local_models(home)[0].weight_bytes == 150


@given(
    names=st.lists(st.from_regex(r"\A[a-zA-Z]{1,3}(/[a-zA-Z0-9.]{1,4})?\Z"), max_size=6),
    wanted=st.from_regex(r"\A[a-zA-Z]{1,3}(/[a-zA-Z0-9.]{1,4})?\Z"),
)
def test_a_name_means_its_model_in_any_case_and_the_whole_name_comes_first(
    names: list[str], wanted: str
) -> None:
    models = [FoundModel(name, Path(name), HUB) for name in dict.fromkeys(names)]
    found = {model.name.lower() for model in matching(wanted.upper(), models)}
    whole = {name.lower() for name in names if name.lower() == wanted.lower()}
    tails = {n.lower() for n in names if n.lower().rpartition("/")[2] == wanted.lower()}
    assert found == (whole or ("/" not in wanted and tails) or set())
    assert matching(f"{wanted}:latest", models) == matching(wanted, models)


def test_a_setting_takes_an_alias_a_hub_id_and_the_name_of_a_found_model(home: Path) -> None:
    alias = CATALOGUE[1]
    assert model_path.named_model(alias.alias) == alias.hub_id
    assert model_path.named_model("owner/not-here") == "owner/not-here"
    studio = checkpoint(home / ".lmstudio/models/owner/Model-4bit")
    for name in ("owner/Model-4bit", "owner/model-4BIT", "model-4bit"):
        assert model_path.named_model(name) == studio
    cached(home, "owner/Model-4bit")
    assert model_path.named_model("model-4bit") == "owner/Model-4bit", "the hub's cache is first"
    assert "which the hub's cache has" in model_path.check_model("owner/Model-4bit")


def test_a_model_that_is_not_whole_is_not_what_a_name_means(home: Path) -> None:
    directory = cached(home, "owner/model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(StartError, match="neither a directory nor a hub id"):
        model_path.named_model("model")
    assert "which the first start fetches" in model_path.check_model("owner/model")
    whole = checkpoint(home / ".lmstudio/models/owner/model")
    assert model_path.named_model("owner/model") == whole, "a pull that was killed hides no other"
    assert [model.program for model in matching("owner/model", local_models())] == [HUB]


def test_the_catalogue_is_sorted_unique_and_fits_where_it_says() -> None:
    aliases = [model.alias for model in CATALOGUE]
    assert len({*aliases, *(model.hub_id.lower() for model in CATALOGUE)}) == 2 * len(CATALOGUE)
    assert [m.download_gb for m in CATALOGUE] == sorted(m.download_gb for m in CATALOGUE)
    for model in CATALOGUE:
        assert catalogued(model.alias.upper()) is catalogued(f"{model.hub_id}:latest") is model
        limit = default_limit(model.memory_gb * GB * 3 // 4, model.memory_gb * GB)
        assert model.weight_bytes <= (limit - working_bytes(limit)) * 0.9, model.alias
        assert model in fitting(model.memory_gb * GB)
        assert model not in fitting((model.memory_gb - 2) * GB)


def test_the_page_tells_each_recommended_model_with_its_size_and_its_mac() -> None:
    page = (PROJECT_DIR / "docs/models.md").read_text()
    for model in CATALOGUE:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{model.alias}`"))
        _, _, _, size, *_, mac, _ = map(str.strip, row.split("|"))
        by_row = f": {model.table_gb} by row" if model.table_bytes else ""
        assert size == f"{model.download_gb}{by_row}"
        assert mac.startswith(f"{model.memory_gb} GB")


def test_of_several_revisions_the_main_one_counts(home: Path) -> None:
    cached(home, "owner/model", "old", is_main=False)
    new = cached(home, "owner/model", "new")
    assert [model.directory for model in hub_models(home / "hub")] == [new]
