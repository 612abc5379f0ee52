"""Checks what bfloat16 weights are computed in, and that they are cast without a second copy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine import model_loader
from hearth.worker.engine.compute_dtype import (
    ComputeDtype,
    cast_rule,
    cast_to_float16,
    choose_dtype,
    emulates_bfloat16,
)
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.vision.vision_self_test import checked_vision
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.setup.kv_setup import cache_root
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import noise
from scripts.harness.vision_worker import picture_of, prompt

M1, M3 = "applegpu_g13s", "applegpu_g15s"


def load(
    name: str,
    dtype: str = "auto",
    quant: int | None = None,
    is_float16_good: Callable[[WeightsIdentity], bool | None] = lambda _identity: None,
) -> LoadedModel:
    directory = fixture_dir(name, "bfloat16", quant)
    settings = load_settings({"MODEL_PATH": str(directory), "DTYPE": dtype}, None)
    return load_model(settings, is_float16_good=is_float16_good)


def leaves(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        *((f"applegpu_g13{size}", True) for size in ("g", "s", "c", "d")),  # M1, Pro, Max, Ultra
        *((f"applegpu_g14{size}", True) for size in ("g", "s", "c", "d")),
        *((f"applegpu_g{number}s", False) for number in (15, 16, 17)),
        *((name, False) for name in ("sm_90", "x86_64", "aarch64", "", "applegpu_g130s")),
    ],
)
def test_only_m1_and_m2_emulate_bfloat16(architecture: str, expected: bool) -> None:
    assert emulates_bfloat16(architecture) is expected


@pytest.mark.parametrize(
    ("setting", "checkpoint", "architecture", "is_good", "name"),
    [
        ("auto", "bfloat16", M1, True, "float16"),
        ("auto", "bfloat16", M1, False, "bfloat16"),
        ("auto", "bfloat16", M1, None, "bfloat16"),
        ("auto", "bfloat16", M3, True, "bfloat16"),
        ("bfloat16", "bfloat16", M1, True, "bfloat16"),
        ("float16", "bfloat16", M3, None, "float16"),
        ("float16", "bfloat16", M1, False, "float16"),
        ("float16", "float32", M1, True, "float32"),
        ("bfloat16", "float16", M1, True, "float16"),
    ],
)
def test_float16_is_chosen_where_it_is_forced_or_was_checked_on_a_chip_that_needs_it(
    setting: str, checkpoint: str, architecture: str, is_good: bool | None, name: str
) -> None:
    chosen = choose_dtype(setting, checkpoint, architecture, is_good)
    assert chosen.name == name
    assert chosen.is_cast is (checkpoint == "bfloat16" and name == "float16")
    assert chosen.reason


def test_why_bfloat16_stays_is_told() -> None:
    reasons = [choose_dtype("auto", "bfloat16", M1, good).reason for good in (None, False)]
    assert "not checked yet (hearth doctor)" in reasons[0]
    assert "not as good" in reasons[1]


def test_a_verdict_of_the_checks_is_asked_for_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_loader, "device_architecture", lambda: M1)
    asked: list[WeightsIdentity] = []
    with caplog.at_level("INFO"):
        loaded = load("qwen3", is_float16_good=lambda identity: not asked.append(identity))
    assert asked == [loaded.identity]
    assert loaded.dtype.row() == {
        "name": "float16",
        "cast": True,
        "reason": "this device emulates bfloat16; float16 is as good here",
    }
    assert {leaf.dtype for leaf in leaves(loaded.model).values()} == {mx.float16}
    assert f"weights are computed in float16: {loaded.dtype.reason}" in caplog.text


@pytest.mark.parametrize(("name", "quant"), [("qwen3", None), ("qwen3_5", None), ("gpt_oss", 4)])
def test_every_bfloat16_leaf_is_cast_and_nothing_else(name: str, quant: int | None) -> None:
    before, after = (leaves(load(name, dtype, quant).model) for dtype in ("bfloat16", "float16"))
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        is_cast = leaf.dtype == mx.bfloat16
        expected = leaf.astype(mx.float16) if is_cast else leaf
        assert after[path].dtype == expected.dtype, path
        assert mx.array_equal(after[path], expected), path
    packed = {leaf.dtype for leaf in after.values()} - {mx.float16}
    assert packed == ({mx.uint32} if quant else {mx.float32} if name == "qwen3_5" else set())


def test_leaves_that_the_model_wants_as_they_are_stay() -> None:
    model = load("falcon_h1", "float16").model
    kinds = {path: leaf.dtype for path, leaf in leaves(model).items()}
    kept = {path for path, kind in kinds.items() if kind == mx.bfloat16}
    assert kept and kept == {path for path in kinds if path.endswith("A_log")}


def test_whether_a_leaf_may_be_cast_is_the_models_word_in_whatever_form() -> None:
    def no_norm(path: str) -> bool:
        return "norm" not in path

    class Broken:
        @property
        def cast_predicate(self) -> Any:
            raise TypeError("'property' object is not callable")

    class Method:
        def cast_predicate(self) -> Any:
            return no_norm

    told = SimpleNamespace(cast_predicate=no_norm)
    for models in ([told], [Method()], [Broken(), told], [object(), told]):
        assert cast_rule(*models) is no_norm
    default = cast_rule(Broken())
    assert default("layers.0.q_proj.weight") and not default("layers.0.mamba.A_log")


def test_casting_takes_no_memory_beside_the_weights() -> None:
    model = load("qwen3", "bfloat16").model
    largest = max(leaf.nbytes for leaf in leaves(model).values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cast_to_float16(model, cast_rule(model))
    assert mx.get_peak_memory() - before < largest / 10
    assert mx.get_active_memory() == before


def test_a_leaf_that_stands_in_two_places_stays_one() -> None:
    """As the head of a model whose head is its embedding."""
    leaf = mx.ones((512, 64), mx.bfloat16)
    mx.eval(leaf)
    tree = {"embedding": {"weight": leaf}, "head": [{"weight": leaf}]}
    del leaf
    before = mx.get_active_memory()
    cast_to_float16(tree, lambda _path: True)
    head: Any = tree["head"]
    assert tree["embedding"]["weight"] is head[0]["weight"]  # type: ignore[call-overload]
    assert head[0]["weight"].dtype == mx.float16
    assert mx.get_active_memory() == before


def test_kept_kv_of_one_dtype_is_not_found_in_another() -> None:
    settings = load_settings({}, None)
    loaded = load("qwen3", "float16")
    roots = [
        cache_root(model, settings) for model in (loaded, load("qwen3"), load("qwen3", "bfloat16"))
    ]
    assert roots[0] != roots[1] == roots[2]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_vision_tower_stays_as_it_is_and_its_rows_are_cast(name: str) -> None:
    loaded = load(name, "float16")
    assert loaded.vision is not None and loaded.dtype == ComputeDtype(
        "float16", True, "DTYPE is float16"
    )
    kinds: dict[bool, set[mx.Dtype]] = {True: set(), False: set()}
    for path, leaf in leaves(loaded.vision.model).items():
        kinds[path.startswith("language_model.")].add(leaf.dtype)
    assert kinds == {True: {mx.float16}, False: {mx.bfloat16}}
    picture = picture_of(loaded, noise(60, 60, seed=1))
    vision = checked_vision(loaded, picture, 1 << 20)
    assert vision is not None, "the logits behind an image are mlx-vlm's"
    engine = Engine(loaded, vision=vision)
    ids, runs = prompt([100, 101, 102], picture, [103])
    cache = engine.new_cache()
    engine.prefill(cache, ids, runs)
    assert {array.dtype for layer in cache for array in layer.state} == {mx.float16}
    made = vision.model_arguments(ids, 0, runs)
    rows = [made["inputs_embeds"], *made.get("deepstack_visual_embeds", [])]
    assert len(rows) == (4 if name == "qwen3_vl" else 1)
    assert {row.dtype for row in rows} == {mx.float16}, "else computed, and kept, in float32"
