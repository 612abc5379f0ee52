"""Adapters compute what upstream computes with them, fit the model or refuse the start."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import forward_of
from hearth.worker.engine.lora import lora_loader
from hearth.worker.engine.lora.lora_adapter import LoraAdapter, applied
from hearth.worker.engine.lora.lora_loader import (
    CONFIG,
    FILES,
    MLX_LM_WEIGHTS,
    PEFT_WEIGHTS,
    LoraLoader,
    why_not_computed,
)
from hearth.worker.engine.mlx_memory import GB, refuse_heavy
from hearth.worker.engine.model_loader import LoadedModel, weights_of
from hearth.worker.engine.prefill_lengths import network_of
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.prompt.prefill_cuts import CutRule
from scripts.harness.lora_files import (
    ADAPTERS,
    adapted,
    adapter_dirs,
    as_peft,
    upstream_adapted,
    with_adapters,
    write_adapter,
)
from scripts.harness.socketless_worker import loaded, marks
from tests.helpers.by_day import by_day

Weights = dict[str, mx.array]
Change = Callable[[Weights], Weights]
IDS = mx.array([[5, 6, 7, 8, 9, 10]])
KINDS = ("qwen3", "qwen3_5", "qwen3_moe", "gpt_oss", "glm4_moe_lite", "falcon_h1")


def logits(model: LoadedModel, name: str = "") -> mx.array:
    with applied(model.adapters.of(name)):
        found: mx.array = model.model(IDS)
    mx.eval(found)
    return found


def same(one: mx.array, other: mx.array) -> bool:
    return bool(mx.array_equal(one, other).item())


def changed(path: Path, change: Change) -> None:
    weights: Weights = mx.load(str(path))  # type: ignore[assignment]
    mx.eval(weights)
    mx.save_safetensors(str(path), change(weights))


def configured(directory: Path, **fields: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(model: LoadedModel, directory: Path) -> str:
    with pytest.raises(StartError) as caught:
        with_adapters(model, mine=directory)
    assert f"ADAPTERS has mine={directory}" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", by_day(KINDS))
def test_an_adapter_gives_the_logits_that_upstream_gives_to_the_bit(name: str) -> None:
    found = {adapter: logits(adapted(name), adapter) for adapter in ADAPTERS}
    for adapter, mine in found.items():
        assert same(mine, logits(upstream_adapted(name, adapter))), adapter
    assert not any(same(found[""], found[adapter]) for adapter in ADAPTERS[1:])


def test_a_model_whose_weights_are_packed_takes_adapters_too(tmp_path: Path) -> None:
    packed = loaded("qwen3", quant=4)
    plain = logits(packed)
    both = with_adapters(
        packed,
        one=write_adapter(tmp_path / "one", packed, 1),
        turned=write_adapter(tmp_path / "turned", packed, 2, kind="dora"),
    )
    assert not same(logits(both, "one"), plain) and not same(logits(both, "turned"), plain)
    assert same(logits(both), plain)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_pefts_files_give_what_mlx_lms_give(tmp_path: Path, kind: str) -> None:
    model = loaded("qwen3")
    mine = write_adapter(tmp_path / "mine", model, 4, kind=kind)
    both = with_adapters(model, mine=mine, theirs=as_peft(mine, tmp_path / "theirs"))
    assert same(logits(both, "mine"), logits(both, "theirs"))
    rooted = as_peft(mine, tmp_path / "rooted", use_rslora=True, lora_alpha=16)
    assert same(logits(with_adapters(model, rooted=rooted), "rooted"), logits(both, "mine"))


def test_between_forwards_the_model_is_the_plain_one_also_where_a_forward_fails() -> None:
    model = adapted("qwen3")
    before = dict(network_of(model).named_modules())
    plain = logits(loaded("qwen3"))
    for name in ADAPTERS[1:]:
        with pytest.raises(ZeroDivisionError), applied(model.adapters.of(name)):
            raise ZeroDivisionError
        assert same(logits(model), plain)
    assert dict(network_of(model).named_modules()) == before


def test_two_adapters_never_share_a_forward() -> None:
    adapters = adapted("qwen3").adapters
    one, two = applied(adapters.of("one")), applied(adapters.of("two"))
    with one, pytest.raises(AssertionError, match="share a forward"), two:
        raise RuntimeError("unreached")
    assert same(logits(adapted("qwen3")), logits(loaded("qwen3")))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_prefill_that_keeps_hidden_states_writes_the_adapters_kv(adapter: str) -> None:
    rows = []
    for model, name in ((adapted("qwen3"), adapter), (upstream_adapted("qwen3", adapter), "")):
        engine = Engine(model, batches=False)
        cache = engine.new_cache()
        hidden = engine.prefill_with_hidden(cache, list(range(60, 130)), (), name, tokens_max=4)
        rows.append([hidden, *(each for layer in cache for each in layer.state)])
    for mine, theirs in zip(*rows, strict=True):
        assert same(mine, theirs)


def test_an_adapters_bytes_are_counted_in_weights_and_forwards(tmp_path: Path) -> None:
    plain, model = loaded("qwen3"), adapted("qwen3")
    extra = sum(array.nbytes for array in weights_of(model)) - sum(
        array.nbytes for array in weights_of(plain)
    )
    assert extra == sum(each.nbytes for each in model.adapters.by_name.values()) > 0
    grid = CutRule(64, marks("qwen3")).grid
    layers = model.adapters.by_name["turned"].layers
    widest = max(layer.plain.weight.size for layer in layers)
    more = forward_of(model, grid).bytes_at(64) - forward_of(plain, grid).bytes_at(64)
    assert more >= 3 * 4 * widest
    lora = with_adapters(plain, one=adapter_dirs("qwen3")["one"])
    assert forward_of(lora, grid).fixed_bytes == 0


# ------------------------------------------------------------ what is refused


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "mine", loaded("qwen3"), 9)


def test_an_adapter_of_another_model_names_what_does_not_fit(mine: Path, tmp_path: Path) -> None:
    assert "the model has no" in refusal(loaded("gpt_oss"), mine)
    hybrid = write_adapter(tmp_path / "hybrid", loaded("qwen3_5"), 1)
    assert "linear_attn" in refusal(loaded("qwen3"), hybrid)


def without(part: str) -> Change:
    return lambda weights: {name: each for name, each in weights.items() if part not in name}


def shorter(weights: Weights) -> Weights:
    name = next(name for name in weights if name.endswith("q_proj.lora_b"))
    return weights | {name: weights[name][:, :-1]}


def one_that_no_trial_reads(weights: Weights) -> Weights:
    rows, width = network_of(loaded("qwen3")).model.embed_tokens.weight.shape
    given = mx.zeros((rows, 4)).at[rows - 1].add(float("nan"))
    embedding = {"lora_a": given, "lora_b": mx.ones((4, width))}
    return weights | {f"model.embed_tokens.{name}": each for name, each in embedding.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shorter, r"q_proj.lora_b is \(4, .* and the model takes \(4, "),
        (
            without("layers.1.self_attn.q_proj.lora_b"),
            r"not just lora_a, lora_b.*|layers\.1\..*lora",
        ),
        (without("layers.1."), r"lack layers.*layers\.1\."),
        (lambda weights: {n: each * float("nan") for n, each in weights.items()}, "no numbers"),
        (one_that_no_trial_reads, "NaN"),
    ],
)
def test_weights_that_are_wrong_are_refused_by_name(mine: Path, change: Change, said: str) -> None:
    changed(mine / MLX_LM_WEIGHTS, change)
    assert re.search(said, refusal(loaded("qwen3"), mine))


def test_the_last_blocks_alone_may_be_adapted(tmp_path: Path) -> None:
    model = loaded("qwen3")
    count = len(network_of(model).layers)
    last = write_adapter(tmp_path / "last", model, 9, num_layers=1)
    changed(
        last / MLX_LM_WEIGHTS,
        lambda weights: {n: each for n, each in weights.items() if f"layers.{count - 1}." in n},
    )
    assert len(with_adapters(model, last=last).adapters.by_name["last"].layers) == 7


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fine_tune_type": "full"}, "mlx_lm.fuse"),
        ({"fine_tune_type": "other"}, "neither mlx-lm's"),
        ({"lora_parameters": {"rank": 4, "alpha": 8}}, "no scale"),
        ({"fine_tune_type": "dora"}, "lora_b, m"),
    ],
)
def test_a_kind_that_is_not_taken_is_refused_with_the_reason(
    mine: Path, fields: dict[str, Any], said: str
) -> None:
    configured(mine, **fields)
    assert said in refusal(loaded("qwen3"), mine)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"modules_to_save": ["lm_head"]}, "trains whole modules"),
        ({"bias": "all"}, "trains biases"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"rank_pattern": {"q_proj": 8}}, "differ in rank"),
        ({"init_lora_weights": "pissa"}, "changes the model too"),
        ({"r": None}, "no r and lora_alpha"),
        ({"r": 8}, "says r=8"),
        ({"alora_invocation_tokens": [7]}, "begins amid a prompt"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"target_modules": ["q_proj", "embed"], "layers_to_transform": None}, ""),
    ],
)
def test_what_of_peft_does_not_map_is_refused_with_what_to_do(
    mine: Path, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    theirs = as_peft(mine, tmp_path / "theirs", **fields)
    if said:
        assert said in refusal(loaded("qwen3"), theirs)
    else:
        assert with_adapters(loaded("qwen3"), theirs=theirs).adapters.by_name


def test_what_peft_left_out_is_not_missed(tmp_path: Path) -> None:
    mine = write_adapter(tmp_path / "mine", loaded("qwen3"), 9, keys=["self_attn.v_proj"])
    fields: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    assert "lack layers" in refusal(loaded("qwen3"), as_peft(mine, tmp_path / "some", **fields))
    fields["exclude_modules"] = ["q_proj"]
    theirs = as_peft(mine, tmp_path / "theirs", **fields)
    assert with_adapters(loaded("qwen3"), theirs=theirs).adapters.by_name


def test_a_model_that_does_not_fit_with_its_adapters_says_how_much_these_are(mine: Path) -> None:
    def admit(nbytes: int) -> None:
        refuse_heavy(nbytes, "owner/model", 64 * GB)

    os.truncate(mine / MLX_LM_WEIGHTS, 90 * GB)
    setup = LoraLoader(load_settings({"ADAPTERS": f"mine={mine}"}, None), admit)
    with pytest.raises(
        StartError, match=r"weights are 91\.0 GB.* 90\.0 GB of them are those of AD"
    ):
        setup.admit(GB)
    with pytest.raises(StartError, match=r"MEMORY_LIMIT_MB\.$"):
        LoraLoader(load_settings({}, None), admit).admit(91 * GB)


def test_an_adapter_that_changes_while_the_model_loads_is_read_as_it_is_hashed(mine: Path) -> None:
    setup = LoraLoader(load_settings({"ADAPTERS": f"mine={mine}"}, None), lambda _nbytes: None)
    configured(mine, lora_parameters={"scale": 3.5})
    identity = WeightsIdentity(mine, patterns=FILES).parts()
    made = setup.load(loaded("qwen3"), lambda at, names: WeightsIdentity(at, patterns=names))
    adapter = made.adapters.by_name["mine"]
    assert adapter.identity == "\n".join(identity)
    assert {layer.adapted.scale for layer in adapter.layers} == {3.5}


def test_a_pickle_is_never_read(mine: Path, tmp_path: Path) -> None:
    theirs = as_peft(mine, tmp_path / "theirs")
    (theirs / PEFT_WEIGHTS).rename(theirs / "adapter_model.bin")
    assert "a pickle, which could run code" in refusal(loaded("qwen3"), theirs)


def test_a_source_that_is_nowhere_is_refused_without_asking_a_hub(tmp_path: Path) -> None:
    assert "neither a directory nor a hub id" in refusal(loaded("qwen3"), tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert f"there is no {CONFIG}" in refusal(loaded("qwen3"), tmp_path / "empty")


def test_a_hub_id_is_fetched_by_its_three_files_alone(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot(source: str, allow_patterns: list[str]) -> str:
        asked.append((source, allow_patterns))
        return str(mine)

    monkeypatch.setattr(lora_loader, "snapshot_download", snapshot)
    assert lora_loader.find_directory("owner/mine") == mine
    assert asked == [("owner/mine", [CONFIG, MLX_LM_WEIGHTS, PEFT_WEIGHTS])]


class _Past(nn.Module):
    """Reads the weights of its layer past the layer, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.layers: list[Any] = []

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        weight = self.inner.weight
        return mx.zeros((*ids.shape, 8)) @ weight.T


def test_a_model_that_reads_weights_past_their_layer_is_found_out() -> None:
    model = _Past()
    good = adapted("qwen3").adapters.by_name["one"]
    place = replace(good.layers[0], holder=model, key="inner", plain=model.inner)
    adapter = LoraAdapter("x", "", (replace(place, adapted=nn.Linear(8, 8, bias=False)),), ())
    assert "past them" in why_not_computed(adapter, model)
    assert model.inner is place.plain
