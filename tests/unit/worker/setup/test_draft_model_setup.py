"""DRAFT_MODEL names a head that fits the model, or the start ends with what was found instead."""

import json
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.speculative import drafters

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings, load_settings
from hearth.worker.engine import model_loader
from hearth.worker.engine.decode import draft_model_loader
from hearth.worker.engine.decode.draft_model_loader import KINDS, REFUSED, find_draft_model
from hearth.worker.engine.mlx_memory import weight_bytes
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.engine.vision.vlm_loader import weight_sizes
from hearth.worker.setup.load_setup import load_all, with_draft_model
from hearth.worker.setup.rank_setup import SingleRank
from hearth.worker.threads.start_worker import StartSteps
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.draft_heads import random_head, save_draft_model, save_head
from tests.helpers.models.draft_targets import DRAFT_TARGETS, draft_target

NAME = "qwen3_5_vl"


class Setup:
    """What DRAFT_MODEL names by some settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.found = settings, find_draft_model(settings)

    def load(self, model: LoadedModel) -> LoadedModel:
        return with_draft_model(model, self.found, self.settings)

    @property
    def nbytes(self) -> int:
        """What is admitted beside the model."""
        assert self.found is not None
        return self.found.nbytes


def setup_of(draft_model: object, **environ: str) -> Setup:
    return Setup(load_settings({"DRAFT_MODEL": str(draft_model)} | environ, None))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return save_head(tmp_path / "head", loaded(NAME).config)


def with_config(directory: Path, **fields: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def nbytes_of(directory: Path) -> int:
    return sum(size for _, size, _ in weight_sizes(directory))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(StartError) as caught:
        call()
    return str(caught.value)


def test_without_draft_model_nothing_is_loaded() -> None:
    setup = setup_of("")
    assert setup.load(loaded("qwen3")) is loaded("qwen3")


def test_a_head_is_admitted_with_its_model(head: Path) -> None:
    admitted: list[int] = []
    memory: Any = SimpleNamespace(
        admit=admitted.append, dense_bytes_max=lambda: 0, loaded=lambda sizes: None
    )
    for name in ("", str(head)):
        environ = {"MODEL_PATH": str(fixture_dir(NAME)), "DRAFT_MODEL": name}
        load_all(load_settings(environ, None), StartSteps(int), memory, bool, SingleRank())
    assert admitted[1] - admitted[0] == nbytes_of(head)


def test_a_head_that_comes_with_the_model_itself_is_loaded_alone(tmp_path: Path) -> None:
    directory = tmp_path / "whole"
    shutil.copytree(fixture_dir(NAME), directory)
    weights = tree_flatten(random_head(loaded(NAME).config).parameters())
    part = {f"mtp.{name}": array for name, array in weights}
    mx.save_safetensors(str(directory / "mtp.safetensors"), part, {"format": "mlx"})
    setup = setup_of(directory)
    head_bytes = sum(array.nbytes for array in part.values())
    assert setup.nbytes == head_bytes
    model = setup.load(load_model(load_settings({"MODEL_PATH": str(directory)}, None)))
    assert model.draft_model is not None
    assert sum(w.nbytes for _, w in tree_flatten(model.draft_model.head.parameters())) == head_bytes
    assert (
        sum(w.nbytes for w in weights_of(model))
        == sum(w.nbytes for w in weights_of(loaded(NAME))) + head_bytes
    )


@pytest.mark.parametrize(
    ("source", "model", "environ", "parts"),
    [
        ("a wide head", NAME, {}, "hidden_size=256|hidden_size=128|leave DRAFT_MODEL empty"),
        ("a head", "qwen3", {}, "of text alone qwen3_5|(qwen3), a model of text alone"),
        ("a head", "qwen3_vl", {}, "its kind 'qwen3_5_mtp' drafts for qwen3_5 and|(qwen3_vl)"),
        ("a head", NAME, {"CACHE_EXACT": "true"}, "in exact mode nothing is drafted"),
        (fixture_dir("qwen3"), NAME, {}, "its kind is 'qwen3', and it is no draft model that"),
        (fixture_dir(NAME), NAME, {}, "this 'qwen3_5' checkpoint has no weights of a head"),
        ("/nowhere/at/all", NAME, {}, "DRAFT_MODEL is '/nowhere/at/all'"),
        ("builtin:rocket", NAME, {}, "DRAFT_MODEL is 'builtin:rocket'"),
        ("no-owner", NAME, {}, "DRAFT_MODEL is 'no-owner'"),
    ],
)
def test_what_cannot_draft_for_a_model_is_refused_with_the_reason(
    tmp_path: Path, source: Any, model: str, environ: dict[str, str], parts: str
) -> None:
    if source in ("a head", "a wide head"):
        size = {"hidden_size": 256} if source == "a wide head" else {}
        source = save_head(tmp_path / "head", loaded(NAME).config, **size)
    text = refusal(lambda: setup_of(source, **environ).load(loaded(model)))
    assert [part for part in parts.split("|") if part not in text] == []


def test_a_draft_model_of_more_tokens_than_the_model_has_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    target = draft_target("qwen3_5_mtp")
    text = target.config["text_config"] | {"vocab_size": 4_096}
    head = save_draft_model(tmp_path / "more", target.config | {"text_config": text})
    told = refusal(lambda: setup_of(head).load(target.loaded))
    assert "4,096 tokens" in told and "3,072" in told


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.night) if at else name
        for at, name in enumerate(DRAFT_TARGETS)
    ],
)
def test_each_kind_of_draft_model_is_loaded_from_its_files(tmp_path: Path, name: str) -> None:
    target = draft_target(name)
    directory = save_draft_model(tmp_path / "it", target.config)
    assert setup_of(directory).nbytes == nbytes_of(directory)
    model = setup_of(directory).load(target.loaded)
    assert model.draft_model is not None and 0 < model.draft_model.token_cost < 10
    more = sum(w.nbytes for w in weights_of(model)) - sum(
        w.nbytes for w in weights_of(target.loaded)
    )
    assert more == pytest.approx(weight_bytes(directory), rel=0.05)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_of_drafters_are_refused_by_name_with_the_reason(head: Path, kind: str) -> None:
    text = refusal(lambda: setup_of(with_config(head, model_type=kind)))
    assert f"its kind is {kind!r}, and {REFUSED[kind]}; qwen3_5_mtp, " in text
    assert "leave DRAFT_MODEL empty" in text


def test_a_drafter_that_says_otherwise_what_it_is_is_refused(head: Path) -> None:
    flash = with_config(head, model_type="qwen3", dflash_config={"mask_token_id": 1})
    assert "its kind is 'qwen3_dflash', and it reads hidden states" in refusal(
        lambda: setup_of(flash)
    )


def test_every_drafter_of_mlx_vlm_is_either_driven_or_refused_with_a_reason() -> None:
    found = {module.name for module in pkgutil.iter_modules(drafters.__path__) if module.ispkg}
    assert found == KINDS.keys() | REFUSED.keys()


def test_a_head_that_brings_code_is_refused_before_it_runs(head: Path) -> None:
    (head / "head.py").write_text("raise SystemExit('ran')")
    text = refusal(lambda: setup_of(with_config(head, model_file="head.py")))
    assert "code of its own" in text and f"DRAFT_MODEL is {str(head)!r}" in text


def test_a_head_whose_weights_are_broken_is_refused(head: Path) -> None:
    setup = setup_of(head)
    (head / "model.safetensors").write_bytes(b"broken")
    assert "which cannot draft" in refusal(lambda: setup.load(loaded(NAME)))


def test_without_mlx_vlm_the_refusal_says_what_to_install(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model_loader, "has_vision", lambda: False)
    assert draft_model_loader.VISION_REMEDY in refusal(lambda: setup_of(head))


@pytest.mark.parametrize(("dtype", "made"), [("float16", mx.float16), ("auto", mx.float32)])
def test_a_head_is_cast_with_its_model(
    head: Path, dtype: str, made: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "backend", lambda: "cpu")
    monkeypatch.setattr(draft_model_loader, "backend", lambda: "cpu")
    directory = fixture_dir(NAME, "bfloat16")
    found = load_settings({"MODEL_PATH": str(directory), "DTYPE": dtype}, None)
    file = str(head / "model.safetensors")
    cast = {name: weight.astype(mx.bfloat16) for name, weight in mx.load(file).items()}
    mx.save_safetensors(file, cast, {"format": "mlx"})
    setup = setup_of(head, DTYPE=dtype)
    model: LoadedModel = setup.load(load_model(found))
    assert model.dtype.is_cast and model.draft_model is not None
    weights = [w for _, w in tree_flatten(model.draft_model.head.parameters())]
    assert {w.dtype for w in weights} == {made}
    assert setup.nbytes == sum(w.nbytes for w in weights)
