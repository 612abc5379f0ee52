"""The meter counts what attention computes, by head shape, and tokens come out of the counts."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.servers import meter_file
from hearth.commands.bench.servers.meter_file import (
    AttentionCount,
    attention_layers,
    layers_of_prompt,
    meter_of,
    read_counts,
)

TEXT, TOWER = (8, 2, 64), (16, 16, 72)  # heads, KV heads, width


@pytest.fixture
def meter() -> ModuleType:
    """Return the meter's module, loaded as a server's interpreter loads it, but put in nowhere."""
    spec = importlib.util.spec_from_file_location("m", meter_file.METER_DIR / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attended(rows: int, tokens: int, shape: tuple[int, int, int] = TEXT) -> tuple[Any, Any]:
    heads, kv_heads, width = shape
    queries = SimpleNamespace(shape=(rows, heads, tokens, width))
    return queries, SimpleNamespace(shape=(rows, kv_heads, 999, width))


def test_the_meter_counts_what_is_read_and_each_call_and_changes_no_answer(
    meter: ModuleType, tmp_path: Path
) -> None:
    fast = SimpleNamespace(scaled_dot_product_attention=lambda q, k, *_, scale: (q, k, scale))
    trunks = SimpleNamespace(attend_with_trunks=lambda queries, keys, *_, mask: mask)
    made = meter.AttentionWrapper(str(tmp_path))
    made.wrap(fast, "scaled_dot_product_attention")
    made.wrap(trunks, "attend_with_trunks")
    for rows, tokens in ((1, 256), (2, 10), (1, 1), (4, 1)):
        q, k = attended(rows, tokens)
        assert fast.scaled_dot_product_attention(q, k, None, scale=0.5) == (q, k, 0.5)
    tower = attended(1, 700, TOWER)
    assert fast.scaled_dot_product_attention(q=tower[0], k=tower[1], scale=1)[2] == 1
    queries, keys = attended(3, 1)
    assert trunks.attend_with_trunks(queries=queries, keys=keys, mask="m") == "m"
    assert read_counts(tmp_path) == {
        TEXT: AttentionCount(256 + 20, 5),
        TOWER: AttentionCount(700, 1),
    }
    assert meter.SLOT.format == meter_file.SLOT.format


# ---------------------------------------------------------------- tokens


def test_the_tower_of_a_vision_model_is_no_part_of_the_text_that_is_read() -> None:
    before = {TOWER: AttentionCount(500, 2), TEXT: AttentionCount(80, 9)}
    after = {TOWER: AttentionCount(500, 2), TEXT: AttentionCount(80 + 4 * 299, 17)}
    layers = layers_of_prompt(before, after, 300, None)
    assert layers == {TEXT: 4.0}, "the last token was read alone"
    later = {TOWER: AttentionCount(9500, 80), TEXT: AttentionCount(4 * 1000, 4 * 6)}
    found = meter_of(later, layers)
    assert found is not None and (found.read_tokens, found.forwards) == (1000, 6)


def test_layers_of_two_shapes_are_one_forward() -> None:
    full, window = (8, 1, 512), (8, 4, 256)
    after = {full: AttentionCount(1 * 299, 1), window: AttentionCount(5 * 299, 5)}
    assert layers_of_prompt({}, after, 300, 6) == {full: 1.0, window: 5.0}
    assert layers_of_prompt({}, after, 300, None) == {full: 1.0, window: 5.0}
    found = meter_of(after, {full: 1.0, window: 5.0})
    assert found is not None and (found.read_tokens, found.forwards) == (299, 1)


@given(
    st.integers(1, 128),
    st.integers(2, 40),
    st.lists(st.integers(1, 4096), min_size=1, max_size=9),
    st.integers(0, 50),
)
def test_any_reading_in_chunks_is_counted_in_tokens(
    layers: int, prompt_layers: int, chunks: list[int], steps: int
) -> None:
    prompt = 2 * layers + prompt_layers  # the meter is right from twice the layers on
    known = layers_of_prompt({}, {TEXT: AttentionCount(layers * (prompt - 1), 9)}, prompt, None)
    rows = sum(chunk for chunk in chunks if chunk > 1)
    calls = layers * (len(chunks) + steps)
    found = meter_of({TEXT: AttentionCount(layers * rows, calls)}, known)
    assert found is not None
    assert found.read_tokens == pytest.approx(rows)
    assert found.forwards == pytest.approx(len(chunks) + steps)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"num_hidden_layers": 36}, 36),
        ({"num_hidden_layers": 64, "full_attention_interval": 4}, 16),
        ({"text_config": {"num_hidden_layers": 5}, "num_hidden_layers": 9}, 5),
        ({"layer_types": ["linear_attention", "full_attention", "sliding_attention"]}, 2),
        ({"layer_types": ["mamba", "attention"]}, 1),
        ({"layer_types": ["conv"]}, None),
        ({"num_hidden_layers": 9, "hybrid_override_pattern": "M*"}, None),
        ({"n_layers": 9}, None),
    ],
)
def test_the_config_says_how_many_layers_attend_where_it_is_plain(
    tmp_path: Path, config: dict[str, Any], count: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert attention_layers(tmp_path) == count
