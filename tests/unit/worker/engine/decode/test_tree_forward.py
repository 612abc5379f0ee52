"""A tree in one forward gives each node the logits of its path, and no other forward is changed."""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, strategies as st
from mlx import nn
from mlx_lm.models import gpt_bigcode
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope

from hearth.worker.engine.decode import tree_forward
from hearth.worker.engine.decode.tree_forward import (
    TokenRope,
    TreeForward,
    ancestors,
    can_hold_trees,
    depths,
)
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_trials import make_tree_forward
from scripts.harness.socketless_worker import loaded

PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(30)]
TREES = st.lists(st.integers(0, 99), min_size=1, max_size=7).map(
    lambda draws: [draw % (node + 1) - 1 for node, draw in enumerate(draws)]
)
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "long_factor": [1.5] * 16,
        "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 64,
    },
}


def filled(model: Any, count: int = len(PROMPT), shift: int = 0) -> list[Any]:
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT[:count]]), cache=cache, **({"shift": shift} if shift else {}))
    return cache


# ------------------------------------------------------------ integers


@given(parents=TREES)
def test_a_row_sees_itself_and_what_its_parent_sees(parents: list[int]) -> None:
    seen = ancestors(parents)
    for row, parent in enumerate(parents):
        above = {at for at, sees in enumerate(seen[parent]) if sees} if parent >= 0 else set()
        assert {at for at, sees in enumerate(seen[row]) if sees} == {row} | above
        assert depths(parents)[row] == len(above)


# ------------------------------------------------------------ forwards


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_gives_tokens_with_positions_of_their_own_the_very_rows_of_a_plain_call(
    kind: str,
) -> None:
    rope = initialize_rope(32, 10_000.0, False, ROPES[kind], 256)
    x = mx.random.normal((1, 3, 5, 32))
    positions = mx.array([40, 41, 41, 42, 42])
    turned = TokenRope(rope)(x, offset=positions)
    for token, position in enumerate([40, 41, 41, 42, 42]):
        # A copy: some ropes scale what they are given in place.
        alone = rope(mx.array(x[:, :, token : token + 1]), offset=position)
        assert mx.array_equal(turned[:, :, token : token + 1], alone).item(), token


@pytest.mark.parametrize("fails", [False, True])
def test_other_forwards_are_what_they_were_bit_by_bit_also_behind_one_that_failed(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("qwen3").model
    ropes = [layer.self_attn.rope for layer in model.layers]
    names = [name for name, _ in model.named_modules()]
    before = [
        np.array(model(mx.array([PROMPT[:n]]), cache=make_prompt_cache(model))) for n in (1, 9)
    ]
    forward = TreeForward(model)
    cache = filled(model)
    if fails:
        monkeypatch.setattr(KVCache, "update_and_fetch", None)
        with pytest.raises(TypeError):
            forward([60], [1, 2], [-1, -1], cache)
        monkeypatch.undo()
    else:
        mx.eval(forward([60], [1, 2], [-1, -1], cache))
    after = [
        np.array(model(mx.array([PROMPT[:n]]), cache=make_prompt_cache(model))) for n in (1, 9)
    ]
    assert all(map(np.array_equal, before, after))
    assert [layer.self_attn.rope for layer in model.layers] == ropes
    assert all(type(rope) is nn.RoPE for rope in ropes)
    assert [name for name, _ in model.named_modules()] == names


# ------------------------------------------------------------ who takes trees


def tried(model: Any) -> TreeForward | None:
    return make_tree_forward(model, functools.partial(make_prompt_cache, model))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "qwen3_5", "falcon_h1", "deepseek_v32"])
def test_windows_states_and_layers_of_several_caches_have_no_branches(name: str) -> None:
    model = loaded(name).model
    assert not can_hold_trees(make_prompt_cache(model))
    assert tried(model) is None


def test_a_model_with_arithmetic_of_its_own_on_the_offset_has_no_branches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = gpt_bigcode.ModelArgs(
        "gpt_bigcode", 64, 2, 96, 2, 256, 1e-5, 1000, num_key_value_heads=1
    )
    with caplog.at_level("INFO"):
        assert tried(gpt_bigcode.Model(args)) is None
    assert "drafts have no branches" in caplog.text


def in_rows(parents: list[int]) -> list[int]:
    return list(range(len(parents)))


def causal(parents: list[int]) -> list[list[bool]]:
    return [[at <= row for at in range(len(parents))] for row in range(len(parents))]


def blind(parents: list[int]) -> list[list[bool]]:
    return [[at == row for at in range(len(parents))] for row in range(len(parents))]


@pytest.mark.parametrize(
    ("name", "wrong"), [("depths", in_rows), ("ancestors", causal), ("ancestors", blind)]
)
@pytest.mark.parametrize("model", ["qwen3", "llama", "qwen3_moe", "qwen3_vl"])
def test_the_trial_sees_wrong_positions_and_wrong_masks(
    model: str, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(loaded(model).model) is not None
    monkeypatch.setattr(tree_forward, name, wrong)
    assert tried(loaded(model).model) is None


def test_an_engine_takes_trees_where_that_is_asked_for_and_works() -> None:
    assert Engine(loaded("qwen3"), trees=True).decoder.takes_trees
    assert not Engine(loaded("qwen3")).decoder.takes_trees
    assert not Engine(loaded("qwen3"), packed=(8, 64), trees=True).decoder.takes_trees
    assert not Engine(loaded("gpt_oss"), trees=True).decoder.takes_trees
