"""Checks what weights are computed in, and that they are made so without a second copy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from hearth.shared.settings import load_settings
from hearth.worker.engine import mlx_memory, model_loader
from hearth.worker.engine.compute_dtype import (
    ComputeDtype,
    cast_leaves,
    cast_rule,
    choose_dtype,
    compute_in,
    emulates_bfloat16,
    make_dense,
    weight_sizes_of,
)
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, backend, load_model
from hearth.worker.engine.vision.image_encoding_and_positions import checked_vision
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.setup.kv_setup import cache_root
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import noise
from scripts.harness.vision_worker import picture_of, prompt
from tests.helpers.by_day import by_day

M1, M3 = "applegpu_g13s", "applegpu_g15s"


def load(
    name: str,
    dtype: str = "auto",
    quant: int | None = None,
    is_float16_good: Callable[[WeightsIdentity], bool | None] = lambda _identity: None,
    dense_max: int | None = None,
    admit: Callable[[int], None] | None = None,
) -> LoadedModel:
    directory = fixture_dir(name, "bfloat16", quant)
    settings = load_settings({"MODEL_PATH": str(directory), "DTYPE": dtype}, None)
    return load_model(settings, is_float16_good=is_float16_good, dense_max=dense_max, admit=admit)


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


@pytest.mark.parametrize(
    ("setting", "name"), [("auto", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("architecture", [M1, M3, "sm_90"])
def test_float16_that_only_stores_float32_is_never_computed_in(
    setting: str, name: str, architecture: str
) -> None:
    chosen = choose_dtype(setting, "float16", architecture, True, config_dtype="float32")
    assert (chosen.name, chosen.is_cast) == (name, True)
    for told in ("", "float16", "bfloat16"):
        assert choose_dtype(setting, "float16", architecture, True, told).name == "float16"


def test_a_verdict_of_the_checks_is_asked_for_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_loader, "device_architecture", lambda: M1)
    monkeypatch.setattr(model_loader, "backend", lambda: "metal")
    asked: list[WeightsIdentity] = []
    with caplog.at_level("INFO"):
        loaded = load("qwen3", is_float16_good=lambda identity: not asked.append(identity))
    assert asked == [loaded.identity]
    assert loaded.dtype.row() == {
        "name": "float16",
        "cast": True,
        "dense": False,
        "reason": "this device emulates bfloat16; float16 is as good here",
    }
    assert {leaf.dtype for leaf in leaves(loaded.model).values()} == {mx.float16}
    assert f"weights are computed in float16: {loaded.dtype.reason}" in caplog.text


@pytest.mark.parametrize(
    ("name", "quant", "others"),
    [
        ("qwen3", None, set()),
        ("qwen3_5", None, {mx.float32}),
        ("gpt_oss", 4, {mx.uint32}),
        ("falcon_h1", None, {mx.bfloat16}),
    ],
)
def test_every_bfloat16_leaf_is_cast_that_the_model_does_not_want_as_it_is_and_nothing_else(
    name: str, quant: int | None, others: set[mx.Dtype]
) -> None:
    before, after = (leaves(load(name, dtype, quant).model) for dtype in ("bfloat16", "float16"))
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        is_cast = leaf.dtype == mx.bfloat16 and not path.endswith("A_log")
        expected = leaf.astype(mx.float16) if is_cast else leaf
        assert after[path].dtype == expected.dtype, path
        assert mx.array_equal(after[path], expected), path
    assert {leaf.dtype for leaf in after.values()} - {mx.float16} == others


def test_whether_a_leaf_may_be_cast_is_the_models_word_and_else_the_librarys() -> None:
    class Broken:
        @property
        def cast_predicate(self) -> Any:
            raise TypeError("'property' object is not callable")

    told = SimpleNamespace(cast_predicate=lambda path: "norm" not in path)
    for models in ([told], [Broken(), told], [object(), told]):
        assert cast_rule(*models) is told.cast_predicate
    default = cast_rule(Broken())
    assert default("layers.0.q_proj.weight") and not default("layers.0.mamba.A_log")


def test_a_leaf_that_stands_in_two_places_stays_one() -> None:
    """As the head of a model whose head is its embedding."""
    leaf = mx.ones((512, 64), mx.bfloat16)
    mx.eval(leaf)
    tree = {"embedding": {"weight": leaf}, "head": [{"weight": leaf}]}
    del leaf
    before = mx.get_active_memory()
    cast_leaves(tree, "float16", lambda _path: True)
    head: Any = tree["head"]
    assert tree["embedding"]["weight"] is head[0]["weight"]  # type: ignore[call-overload]
    assert head[0]["weight"].dtype == mx.float16
    assert mx.get_active_memory() == before


def test_kept_kv_of_one_dtype_or_form_is_not_found_in_another() -> None:
    settings = load_settings({}, None)
    forms = [load("qwen3", dtype) for dtype in ("float16", "bfloat16", "auto")]
    forms += [load("qwen3", dense_max=0)]  # as it is: its bits need no cast of their own
    forms += [load("qwen3", quant=4), load("qwen3", quant=4, dense_max=0)]
    assert forms[-1].dtype.name == forms[-2].dtype.name == "float32"
    roots = [cache_root(model, settings) for model in forms]
    assert len(set(roots)) == 5 and roots[1] == roots[3]


# ---------------------------------------------------------------- what a CPU computes in

CPU_ALONE = pytest.mark.skipif(backend() != "cpu", reason="a GPU computes packed weights")
FORMS = [("qwen3", None), ("qwen3", 4), ("gpt_oss", 4), ("glm4_moe_lite", 4), ("falcon_h1", 4)]


@CPU_ALONE
@pytest.mark.parametrize(("name", "quant"), FORMS)
def test_all_is_made_float32_where_it_fits_and_is_admitted_so(name: str, quant: int | None) -> None:
    admitted: list[int] = []
    loaded = load(name, quant=quant, admit=admitted.append)
    assert {leaf.dtype for leaf in leaves(loaded.model).values()} == {mx.float32}
    assert loaded.dtype.is_dense is (quant is not None)
    headers = 50_000
    assert loaded.facts.weight_bytes <= admitted[0] <= loaded.facts.weight_bytes + headers
    made = "dense float32, made from 4 bits" if quant else "float32, made from bfloat16"
    assert loaded.facts.computed_in.startswith(f"{made}: ")


@CPU_ALONE
@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ({"dense_max": 0}, {mx.bfloat16}),
        ({"dtype": "bfloat16", "quant": 4}, {mx.uint32, mx.bfloat16}),
    ],
)
def test_bfloat16_stays_where_it_is_set_and_where_float32_does_not_fit(
    how: dict[str, Any], kinds: set[mx.Dtype]
) -> None:
    loaded = load("qwen3", **how)
    assert loaded.dtype.name == "bfloat16" and not loaded.dtype.is_cast
    assert {leaf.dtype for leaf in leaves(loaded.model).values()} == kinds


@CPU_ALONE
@pytest.mark.parametrize("name", by_day(["qwen3", "gpt_oss", "falcon_h1"], ["gpt_oss"]))
def test_codes_stay_where_their_dense_form_does_not_fit_and_nothing_is_of_16_bits(
    name: str,
) -> None:
    sizes = weight_sizes_of(load(name, "bfloat16", 4).model)
    loaded = load(name, quant=4, dense_max=sizes.dense_bytes - 1)
    assert not loaded.dtype.is_dense and "dense float32 would take" in loaded.dtype.reason
    assert {leaf.dtype for leaf in leaves(loaded.model).values()} == {mx.uint32, mx.float32}
    assert loaded.facts.weight_bytes == sizes.cast_bytes
    assert loaded.facts.computed_in == "4 bits, float32"
    engine = Engine(loaded)
    cache = engine.new_cache()
    engine.prefill(cache, [100, 101, 102])
    held = [leaf for _, leaf in tree_flatten([layer.state for layer in cache])]
    kinds = {leaf.dtype for leaf in held if isinstance(leaf, mx.array)}
    assert not kinds & {mx.bfloat16, mx.float16} and mx.float32 in kinds


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 3, 64), ("affine", 8, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)],
)
def test_dense_layers_hold_the_numbers_that_the_codes_stand_for(
    mode: str, bits: int, group_size: int
) -> None:
    """Embedding, matrix with a bias, experts and heads, of each library."""
    how = {"group_size": group_size, "bits": bits, "mode": mode}
    model = nn.Module()
    model.matrix, model.embedding = nn.Linear(128, 64), nn.Embedding(32, 128)
    model.experts = [SwitchLinear(128, 64, 3, bias=True)]
    model.heads = MultiLinear(128, 64, 2)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **how)
    codes = dict(model.named_modules())
    sizes = weight_sizes_of(model)
    compute_in(ComputeDtype("float32", is_cast=True, is_dense=True), model)
    dense = dict(model.named_modules())
    assert sizes.dense_bytes == sum(leaf.nbytes for leaf in leaves(model).values())
    kinds = {name: type(module) for name, module in dense.items() if name and "weight" in module}
    assert kinds == {
        "matrix": nn.Linear,
        "embedding": nn.Embedding,
        "experts.0": SwitchLinear,
        "heads": MultiLinear,
    }
    for name in kinds:
        packed, weight = codes[name], dense[name]["weight"]
        scales, biases = packed["scales"], packed.get("biases")
        if mode == "affine":
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        expected = mx.dequantize(packed["weight"], scales, biases, **how)
        assert weight.dtype == mx.float32 and mx.array_equal(weight, expected), name
    bias = codes["matrix"]["bias"].astype(mx.float32)
    assert mx.array_equal(dense["matrix"]["bias"], bias)


def test_what_only_its_own_class_computes_stays_packed() -> None:
    class FusedQuantizedLinear(nn.QuantizedLinear):
        pass

    model = nn.Module()
    model.fused = FusedQuantizedLinear(128, 64)
    experts = {"mode": "nvfp4", "group_size": 16, "global_scale": True}
    model.scaled = QuantizedSwitchLinear(128, 64, 2, **experts)  # type: ignore[arg-type]
    assert not weight_sizes_of(model).is_packed
    make_dense(model)
    assert type(model.fused) is FusedQuantizedLinear
    assert type(model.scaled) is QuantizedSwitchLinear


def test_dense_layers_are_made_one_by_one() -> None:
    model = nn.Module()
    model.layers = [nn.QuantizedLinear(1024, 1024, bias=False) for _ in range(16)]
    mx.eval(model.parameters())
    mx.clear_cache()
    own = sum(leaf.nbytes for leaf in leaves(model).values())
    before = mx.get_active_memory() - own
    mx.reset_peak_memory()
    compute_in(ComputeDtype("float32", is_dense=True), model)
    dense = sum(leaf.nbytes for leaf in leaves(model).values())
    assert dense == 16 * 4 * 1024 * 1024
    assert mx.get_active_memory() - before < dense * 1.01
    assert mx.get_peak_memory() - before < dense + dense / 8


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_worker_that_comes_back_decides_as_the_first_one_did(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, total = 16_000, 20_000

    def may_take(available: int, others: int = 0) -> int:
        told = SimpleNamespace(available=available)
        monkeypatch.setattr(mlx_memory.psutil, "virtual_memory", lambda: told)
        return mlx_memory.dense_bytes_max(total, workers, others)

    first = may_take(free)
    assert first == free // 2 // workers
    others = (workers - 1) * first  # which are loaded by then
    assert may_take(free - others, others) == first
    assert may_take(2 * total) == total // 2 // workers, "no more than the workers' memory"
    larger = total - 500  # other models of MODELS
    mlx_memory.refuse_heavy(may_take(free, larger), "a dense form", total, larger)


@pytest.mark.parametrize("name", by_day(["qwen2_5_vl", "qwen3_vl"], ["qwen3_vl"]))
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
