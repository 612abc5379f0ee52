"""A model that cannot be split is refused in a sentence that says what to set."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.utils import tree_flatten

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.ranks.loading.sharded_model import Sharded
from scripts.fixtures.fixture_cache import fixture_dir


def group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def part(size: int, split: str = "tensor", name: str = "qwen3") -> Any:
    """Return what is loaded of a fixture."""
    return Sharded(group(size), split).load(Path(fixture_dir(name)), False)[0]


def nbytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def test_the_bytes_of_the_part_are_admitted_and_not_those_of_the_files() -> None:
    admitted: list[int] = []
    whole, half = part(1), Sharded(group(2), "tensor")
    settings = load_settings({"MODEL_PATH": str(fixture_dir("qwen3"))}, None)
    load_model(settings, admit=admitted.append, part=half)
    half = part(2)
    assert admitted == [nbytes(half)]
    split = nbytes(whole) - nbytes(half)
    kept = sum(
        array.nbytes
        for name, array in tree_flatten(whole.parameters())
        if "proj" not in name  # embeddings, head and norms are whole on each rank
    )
    assert split == (nbytes(whole) - kept) // 2


def test_all_parameters_are_counted_before_the_model_is_split() -> None:
    sharded = Sharded(group(2), "tensor")
    model, _, _ = sharded.load(Path(fixture_dir("qwen3")), False)
    assert sharded.parameter_count > sum(a.size for _, a in tree_flatten(model.parameters()))


def test_heads_that_do_not_divide_are_named_with_their_number() -> None:
    with pytest.raises(StartError, match="num_attention_heads=4, which is no multiple of it"):
        part(3)
    with pytest.raises(StartError, match="num_key_value_heads=2"):
        part(4)


def test_a_family_that_cannot_be_split_is_named() -> None:
    with pytest.raises(StartError, match=r"type 'falcon_h1' over ranks .* Set RANKS=1"):
        part(2, name="falcon_h1")
    with pytest.raises(StartError, match=r"no pipeline for models of type 'qwen3' .*=tensor"):
        part(2, "pipeline")


def test_a_model_that_sees_is_loaded_without_its_tower() -> None:
    sharded = Sharded(group(2), "tensor")
    model, tokenizer, config = sharded.load(Path(fixture_dir("qwen3_5_vl")), False)
    assert "vision_config" in config and tokenizer.chat_template
    assert not [name for name, _ in tree_flatten(model.parameters()) if "vision" in name]


def test_a_pipeline_gives_a_rank_some_of_the_layers() -> None:
    whole, last = part(1, name="qwen3_moe"), part(2, "pipeline", "qwen3_moe")
    assert (len(whole.layers), len(last.layers)) == (4, 2)
