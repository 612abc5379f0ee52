"""Checks that float16 is taken where it is as good as bfloat16, and that no weight is touched."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from hearth.shared.settings import load_settings
from hearth.worker.doctor import check_float16 as module
from hearth.worker.doctor.check_context import Canary, LeftOut
from hearth.worker.doctor.check_float16 import DtypeComparison, compare_dtypes
from hearth.worker.doctor.checked_machine import subject_of
from hearth.worker.doctor.findings import CheckResult, Findings, FindingsFile
from hearth.worker.engine import model_loader
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.setup.doctor_setup import is_float16_good
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.worker.checked_fixture import context_of, run_of

TOKENS = [(7 * n * n + 31 * n) % 2_900 + 100 for n in range(30)]
PIECE = 12


def load(name: str = "qwen3", quant: int | None = None, dtype: str = "bfloat16") -> LoadedModel:
    directory = fixture_dir(name, "bfloat16", quant)
    return load_model(load_settings({"MODEL_PATH": str(directory), "DTYPE": dtype}, None))


def leaves(loaded: LoadedModel) -> dict[str, mx.array]:
    return dict(tree_flatten(loaded.model.parameters()))


def comparing(loaded: LoadedModel, tokens: Sequence[int] = TOKENS) -> Any:
    return compare_dtypes(loaded, lambda: make_prompt_cache(loaded.model), tokens, PIECE)


def result_of(loaded: LoadedModel, tokens: Sequence[int]) -> CheckResult:
    running = comparing(loaded, tokens)
    try:
        while True:
            next(running)
    except StopIteration as end:
        reason = end.value.why_not_good()
        return CheckResult("float16", "ok", end.value.figures | {"float16": not reason}, 0, reason)
    except LeftOut as why:
        return CheckResult("float16", "left out", reason=str(why))


def found(loaded: LoadedModel, tokens: Sequence[int] = TOKENS) -> CheckResult:
    """What the check found; the weights are afterwards what they were, to the bit and the object"""
    before = leaves(loaded)
    result = result_of(loaded, tokens)
    after = leaves(loaded)
    assert before.keys() == after.keys()
    assert all(after[path] is leaf for path, leaf in before.items())
    return result


@pytest.mark.parametrize(
    ("name", "quant", "tokens"),
    [
        *((name, None, TOKENS) for name in ("qwen3", "falcon_h1")),
        pytest.param("qwen3_5", None, TOKENS, marks=pytest.mark.night),
        pytest.param("qwen3_vl", None, TOKENS, marks=pytest.mark.night),
        # Quantised experts are slow on a CPU.
        pytest.param("gpt_oss", 4, TOKENS[:5], marks=pytest.mark.night),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_float16_is_as_good_where_nothing_leaves_its_range(
    name: str, quant: int | None, tokens: list[int]
) -> None:
    result = found(load(name, quant), tokens)
    assert result.verdict == "ok" and result.reason == ""
    figures = result.figures
    assert figures["float16"] is True and figures["positions"] == len(tokens)
    errors = figures["float16_error"], figures["bfloat16_error"]
    assert isinstance(errors[0], float) and isinstance(errors[1], float)
    assert 0 < errors[0] < errors[1] / 2, "float16 has three bits more"


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"], ids=["own head", "tied head"])
def test_what_is_called_float16_is_what_a_model_cast_for_good_computes(name: str) -> None:
    """Each layer is cast alone, so the whole must be compared with a model that is cast whole."""
    loaded, cast = load(name), load(name, dtype="float16")
    comparison = DtypeComparison(loaded, lambda: make_prompt_cache(loaded.model))
    logits = comparison.logits(TOKENS, "float16")
    cache = make_prompt_cache(cast.model)
    assert mx.array_equal(logits, cast.model(mx.array([TOKENS]), cache=cache)[0])
    held = [layer.state[0] for layer in comparison.caches["float16"]]
    assert all(mx.array_equal(was, layer.state[0]) for was, layer in zip(held, cache, strict=True))


def weight_beyond(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight[3, 5] = 1e5


def activation_beyond(model: Any) -> None:
    """Every weight is within the range."""
    layer = model.model.layers[0].mlp
    for projection in (layer.up_proj, layer.down_proj):
        projection.weight = projection.weight * 600


def activation_near_the_end(model: Any) -> None:
    """Another prompt may take it further."""
    embedding = model.model.embed_tokens
    embedding.weight = embedding.weight * 8_000


def a_layer_in_float32(model: Any) -> None:
    """Its KV would take twice the memory: a bfloat16 leaf beside float16 makes float32."""
    object.__setattr__(model, "cast_predicate", lambda path: "layers.1.input" not in path)


def values_below(model: Any) -> None:
    """They become 0 there, and it answers worse."""
    for layer in model.model.layers:
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        norm.weight = norm.weight * 2.0**-24
        mlp.gate_proj.weight = mlp.gate_proj.weight * 2.0**17
        mlp.up_proj.weight = mlp.up_proj.weight * 2.0**17
        mlp.down_proj.weight = mlp.down_proj.weight * 2.0**14


@pytest.mark.parametrize(
    ("spoil", "is_finite", "said"),
    [
        (weight_beyond, False, "not finite"),
        (activation_beyond, False, "not finite"),
        (activation_near_the_end, True, "an activation is .* 65,504"),
        (a_layer_in_float32, True, "twice the KV"),
        (values_below, True, "the likeliest token is another one"),
    ],
)
def test_a_model_that_float16_does_not_hold_is_refused_with_the_reason(
    spoil: Callable[[Any], None], is_finite: bool, said: str
) -> None:
    loaded = load()
    spoil(loaded.model)
    result = found(loaded)
    assert (result.figures["float16"], result.figures["finite"]) == (False, is_finite)
    assert re.search(said, result.reason)


@pytest.mark.parametrize(
    ("name", "quant", "dtype", "reason"),
    [
        ("qwen3", None, "float16", "the weights are float16"),
        ("qwen3_moe", None, "bfloat16", "Gather"),
    ],
)
def test_what_cannot_be_compared_is_left_out(
    name: str, quant: int | None, dtype: str, reason: str
) -> None:
    result = found(load(name, quant, dtype))
    assert result.verdict == "left out" and reason in result.reason
    assert "float16" not in result.figures


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_check_that_is_dropped_leaves_the_model_as_it_was(steps: int) -> None:
    loaded = load()
    before = leaves(loaded)
    cold = loaded.model(mx.array([TOKENS]))
    running = comparing(loaded)
    for _ in range(steps):
        next(running)
    running.close()
    assert all(leaf is before[path] for path, leaf in leaves(loaded).items())
    assert mx.array_equal(loaded.model(mx.array([TOKENS])), cold)


def run_on(architecture: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Findings:
    monkeypatch.setattr(module, "device_architecture", lambda: architecture)
    context = replace(context_of("qwen3"), loaded=loaded, engine=Engine(loaded))
    context.canary = Canary(turns=(tuple(TOKENS),), other=(), answer_tokens=1)
    run = run_of(context, "float16")
    while run.step():
        pass
    return run.findings()


def test_on_a_chip_that_emulates_bfloat16_the_canary_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = run_on("applegpu_g14s", load(), monkeypatch)
    assert findings.float16 is True
    assert findings.checks[0].figures["positions"] == len(TOKENS)
    loaded = load()
    loaded.model.model.norm.weight = loaded.model.model.norm.weight * 1e6
    findings = run_on("applegpu_g13g", loaded, monkeypatch)
    assert findings.float16 is False and not findings.faults, "a fact, and no fault"


def test_on_another_chip_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = run_on("applegpu_g16s", load(), monkeypatch)
    assert findings.float16 is None and findings.checks[0].verdict == "left out"
    assert "computes bfloat16 itself" in findings.checks[0].reason


def test_a_model_that_was_found_good_is_cast_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_loader, "device_architecture", lambda: "applegpu_g13g")
    monkeypatch.setattr(model_loader, "backend", lambda: "metal")
    directory = fixture_dir("qwen3", "bfloat16")
    environ = {"MODEL_PATH": str(directory), "KV_CACHE_DIR": str(tmp_path)}
    dtypes = []
    for doctor, good in (("auto", None), ("auto", True), ("off", True), ("auto", False)):
        settings = load_settings({**environ, "DOCTOR": doctor}, None)
        if good is not None:
            found = Findings(subject_of(WeightsIdentity(directory)), "bfloat16", float16=good)
            FindingsFile(tmp_path, found.subject).save(found)
        read = partial(is_float16_good, settings)
        dtypes.append(load_model(settings, is_float16_good=read).dtype.name)
    assert dtypes == ["bfloat16", "float16", "bfloat16", "bfloat16"]
