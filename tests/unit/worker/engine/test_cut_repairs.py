"""Logits do not depend on where a prompt is cut, and a repair that upstream needs no more is told.

What the inference code of DeepSeek-V4 makes of a whole prompt is written down here with numpy.
"""

import functools
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache, PoolingCache, make_prompt_cache
from mlx_vlm.models.deepseek_v4 import language as deepseek_v4
from mlx_vlm.models.deepseek_v4.config import ModelConfig as DeepSeekV4Config
from mlx_vlm.models.hunyuan_vl import language as hunyuan_vl
from mlx_vlm.models.hy_v4 import language as hy_v4
from mlx_vlm.models.hy_v4.config import ModelConfig as HyV4Config
from mlx_vlm.models.hy_v4.indexer import HyV4Indexer
from mlx_vlm.models.mllama import language as mllama
from mlx_vlm.models.mllama.config import TextConfig as MllamaConfig
from numpy.typing import NDArray

from hearth.shared.settings import load_settings
from hearth.worker.engine import cut_repairs
from hearth.worker.engine.cut_repairs import (
    OrderedRotatingKVCache,
    OverlappedBatchPoolingCache,
    OverlappedPoolingCache,
    repair_cuts,
)
from hearth.worker.engine.model_loader import load_model
from scripts.fixtures.checkpoint_files import randomise, save_weights, vision_model, write_json
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.socketless_worker import loaded

TOKENS: Final = 300  # of the prompts: two blocks of 128 and a part of one
VOCABULARY, HIDDEN = 64, 32
CUTS: Final = {
    "at multiples of 64": (64, 64, 64, 64, 44),
    "at odd places": (37, 61, 3, 90, 1, 17, 2, 55, 34),
    "and the last tokens one by one": (260, *[1] * 40),
}
V4: Final[dict[str, Any]] = {
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "sliding_window": 32},
    **{"num_attention_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16},
    **{"o_groups": 1, "o_lora_rank": 8, "hc_mult": 2, "hc_sinkhorn_iters": 2},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 0},
    # The choice is among 75 rows; upstream's blocks of rows are as small as they can be.
    **{"index_n_heads": 8, "index_head_dim": 16, "index_topk": 8},
    **{"index_block": 4, "index_keep": 2},
}
HY: Final[dict[str, Any]] = {
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 32},
    **{"num_hidden_layers": 3, "num_attention_heads": 2, "moe_intermediate_size": 16},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"qk_nope_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2},
    **{"index_n_heads": 8, "index_head_dim": 16, "index_topk": 16},
}


MLLAMA: Final[dict[str, Any]] = {
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "cross_attention_layers": [1],
}
MODELS: Final = {
    "deepseek_v4": lambda: deepseek_v4.LanguageModel(DeepSeekV4Config(**V4)),
    "hy_v4": lambda: hy_v4.LanguageModel(HyV4Config(**HY)),
    "mllama": lambda: mllama.LanguageModel(MllamaConfig(**MLLAMA)),
}


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    """On Metal `argpartition` sorts, and hides what HYV4's compiled choice does."""
    with mx.stream(mx.cpu):
        yield


def made(module: Any) -> Any:
    randomise(module)
    return module


def prompt() -> list[int]:
    return [int(id) for id in np.random.default_rng(1).integers(0, VOCABULARY, TOKENS)]


def logits(model: Any, cuts: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits (tokens, vocabulary) of the prompt, read in forwards of these lengths."""
    assert sum(cuts) == TOKENS
    cache, ids, read = make_prompt_cache(model), iter(prompt()), []
    for count in cuts:
        part = mx.array([list(itertools.islice(ids, count))])
        read.append(model(part, cache=cache).logits[0])
        mx.eval(read[-1], [layer.state for layer in cache if not layer.empty()])
    return np.array(mx.concatenate(read))


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_where_a_prompt_is_cut(name: str, cuts: Sequence[int]) -> None:
    model = made(MODELS[name]())
    repair_cuts(model)
    whole = logits(model, [TOKENS])
    assert np.abs(logits(model, cuts) - whole).max() < 1e-5 * np.abs(whole).max()


# ---------------------------------------------------------------- DeepSeek V4: blocks that overlap


def compressor_of(ratio: int) -> Any:
    return made(deepseek_v4.Compressor(DeepSeekV4Config(**V4), ratio, V4["head_dim"]))


def hidden(count: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, count, HIDDEN), key=mx.random.key(seed))


def makers_rows(compressor: Any, x: mx.array) -> NDArray[np.float64]:
    """Return the pooled rows (blocks, head_dim) that the makers' code makes of `x` as a whole."""
    width, ratio = compressor.head_dim, compressor.compress_ratio
    inputs = np.array(x[0], np.float64)[: x.shape[1] // ratio * ratio]
    kv, gate = (
        (inputs @ np.array(part.weight, np.float64).T).reshape(-1, ratio, compressor.out_dim)
        for part in (compressor.wkv, compressor.wgate)
    )
    gate += np.array(compressor.ape)
    rows = []
    for number in range(len(kv)):
        values, scores = kv[number][:, -width:], gate[number][:, -width:]
        if compressor.overlap and number:
            values = np.concatenate([kv[number - 1][:, :width], values])
            scores = np.concatenate([gate[number - 1][:, :width], scores])
        weights = np.exp(scores - scores.max(0))
        row = (weights / weights.sum(0) * values).sum(0)
        row *= np.array(compressor.norm.weight) / np.sqrt((row**2).mean() + 1e-6)
        count = compressor.rope_head_dim
        angles = number * ratio * 160_000.0 ** (-np.arange(0, count, 2) / count)
        turned = (row[-count::2] + 1j * row[1 - count :: 2]) * np.exp(1j * angles)
        row[-count::2], row[1 - count :: 2] = turned.real, turned.imag
        rows.append(row)
    return np.array(rows)


def read(compressor: Any, x: mx.array, cuts: Sequence[int], cache: Any) -> Any:
    for start, count in zip(itertools.accumulate((0, *cuts)), cuts, strict=False):
        compressor(x[:, start : start + count], cache, start)
    return cache


def rows_in(cache: Any) -> NDArray[np.float32]:
    return np.array(cache.pooled[0])


@pytest.mark.parametrize(
    "cuts", [(30,), (8, 8, 14), (1, 2, 3, 4, 5, 6, 9), (3, 1, 1, 25), (13, *[1] * 17), (2, 5, 23)]
)
def test_rows_of_overlapping_blocks_are_those_of_the_makers_code(cuts: Sequence[int]) -> None:
    compressor, x = compressor_of(4), hidden(30)
    cache = read(compressor, x, cuts, OverlappedPoolingCache(4))
    np.testing.assert_allclose(rows_in(cache), makers_rows(compressor, x), atol=1e-5)
    assert cache.remainder == 2
    last = np.array(x[:, 24:28] @ compressor.wkv.weight.T)
    np.testing.assert_allclose(np.array(cache.previous_kv), last, atol=1e-5)


@pytest.mark.parametrize("cuts", [(300,), (128, 128, 44), (100, 1, 27, 150, 22)])
def test_rows_of_blocks_that_do_not_overlap_are_upstreams(cuts: Sequence[int]) -> None:
    compressor, x = compressor_of(128), hidden(300)
    cache = read(compressor, x, cuts, PoolingCache(128))
    np.testing.assert_allclose(rows_in(cache), makers_rows(compressor, x), atol=1e-5)


def test_what_a_cache_keeps_of_the_last_block_goes_on_from_a_copy_and_is_never_written_to() -> None:
    compressor, x = compressor_of(4), hidden(30)
    cache = read(compressor, x[:, :14], (14,), OverlappedPoolingCache(4))
    names = ("buf_kv", "buf_gate", "pooled", "previous_kv", "previous_gate")
    kept = {name: mx.array(getattr(cache, name)) for name in names}
    before = {name: getattr(cache, name) for name in names[2:]}
    for start in range(14, 30):
        compressor(x[:, start : start + 1], cache, start)
    for name, array in before.items():
        assert mx.array_equal(array, kept[name]), name
    resumed = OverlappedPoolingCache(4)
    vars(resumed).update(kept, remainder=2)
    for start in range(14, 30):
        compressor(x[:, start : start + 1], resumed, start)
    assert np.array_equal(rows_in(resumed), rows_in(cache))


def test_sequences_in_a_batch_keep_their_own_last_block() -> None:
    compressor, lengths = compressor_of(4), (3, 9, 14, 8)
    x = mx.concatenate([hidden(30, seed) for seed in range(len(lengths))])
    caches = [
        read(compressor, x[row : row + 1], (length,), OverlappedPoolingCache(4))
        for row, length in enumerate(lengths)
    ]
    batch = caches[0].merge(caches[:2])
    batch.extend(OverlappedPoolingCache.merge(caches[2:]))
    assert type(batch) is OverlappedBatchPoolingCache
    rows, starts = [0, 1, 2, 3], list(lengths)

    def step(count: int) -> None:
        for _ in range(count):
            parts = [x[row : row + 1, at : at + 1] for row, at in zip(rows, starts, strict=True)]
            compressor(mx.concatenate(parts), batch, mx.array(starts))
            starts[:] = [at + 1 for at in starts]

    step(6)
    batch.filter([0, 2, 3])
    del rows[1], starts[1]
    step(5)
    for place, row in enumerate(rows):
        single, at = batch.extract(place), starts[place]
        compressor(x[row : row + 1, at:30], single, at)
        expected = makers_rows(compressor, x[row : row + 1])
        np.testing.assert_allclose(rows_in(single), expected, atol=1e-5)


def test_the_last_block_is_counted_and_evaluated_with_the_rest() -> None:
    cache = read(compressor_of(4), hidden(8), (8,), OverlappedPoolingCache(4))
    assert [id(cache.previous_kv), id(cache.previous_gate)] == [id(a) for a in cache.state[-2:]]
    arrays = (cache.buf_kv, cache.buf_gate, cache.pooled, cache.previous_kv, cache.previous_gate)
    assert cache.nbytes == sum(array.nbytes for array in arrays)


def test_upstream_still_forgets_the_block_before() -> None:
    compressor, x = compressor_of(4), hidden(16)
    rows = rows_in(read(compressor, x, (8, 8), PoolingCache(4)))
    errors = np.abs(rows - makers_rows(compressor, x)).max(1)
    assert errors[2] > 0.01, "upstream is mended: drop the caches that keep the last block"
    assert errors[[0, 1, 3]].max() < 1e-5


# ---------------------------------------------------------------- choices


def row_choice(indexer: Any, cache: Any, start: int, count: int) -> NDArray[np.int64]:
    """Return the rows (count, index_topk), ascending, that the next tokens choose."""
    asked = mx.random.normal((1, count, V4["q_lora_rank"]), key=mx.random.key(start))
    rope = deepseek_v4.DeepseekV4RoPE(V4["qk_rope_head_dim"], 160_000.0)
    chosen = indexer(hidden(count, start), asked, rope, cache, start)
    return np.sort(np.array(chosen[0], np.int64), axis=-1)


def newest_choices(indexer: Any) -> set[int]:
    """Return the rows that the tokens behind 15 rows choose; blocks of four rows end at row 12."""
    cache = OverlappedPoolingCache(4)
    row_choice(indexer, cache, 0, 60)
    return {int(row) for start in (60, 61, 62) for row in row_choice(indexer, cache, start, 1)[0]}


def test_upstream_still_chooses_no_row_behind_the_last_whole_block_of_rows() -> None:
    indexer = made(deepseek_v4.Indexer(DeepSeekV4Config(**V4), 4))
    assert max(newest_choices(indexer)) < 12, "upstream is mended: drop the choice among all rows"
    repair_cuts(indexer)
    assert max(newest_choices(indexer)) == 14


def test_rows_are_chosen_as_upstream_chooses_without_blocks_and_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indexer = made(deepseek_v4.Indexer(DeepSeekV4Config(**V4 | {"index_block": 0}), 4))
    expected = row_choice(indexer, OverlappedPoolingCache(4), 0, 150)
    repair_cuts(indexer)
    # Early tokens see fewer rows than they choose; which of the unseen ones fill up is not said.
    assert np.array_equal(
        row_choice(indexer, OverlappedPoolingCache(4), 0, 150)[32:], expected[32:]
    )
    monkeypatch.setattr(cut_repairs, "SCORES_MAX", 9_000)
    assert np.array_equal(
        row_choice(indexer, OverlappedPoolingCache(4), 0, 150)[32:], expected[32:]
    )


def token_choice(indexer: Any, count: int) -> tuple[set[int], set[int]]:
    """Return the tokens that the last of `count` chooses, and those with the largest scores."""
    x, asked = hidden(count), mx.random.normal((1, count, HY["q_lora_rank"]), key=mx.random.key(2))
    chosen = indexer(x, asked, None, KVCache())[0, 0, -1]
    shape = (1, count, indexer.n_heads, indexer.head_dim)
    queries = indexer.rope(indexer.wq_b(asked).reshape(shape).swapaxes(1, 2), offset=0)
    keys = np.array(indexer.rope(indexer.k_norm(indexer.wk(x))[:, None], offset=0)[0, 0])
    products = np.maximum(np.array(queries[0, :, -1]) @ keys.T, 0)
    scores = np.array(indexer.weights_proj(x)[0, -1]) @ products
    best = np.argsort(scores)[-indexer.index_topk :]
    return {int(token) for token in chosen}, {int(token) for token in best}


def test_upstream_still_parts_longer_scores_where_it_parted_the_first_ones() -> None:
    # No other test compiles a choice of so many tokens.
    indexer = made(HyV4Indexer(HyV4Config(**HY | {"index_topk": 24})))
    first = token_choice(indexer, 40)
    assert first[0] == first[1]
    chosen, best = token_choice(indexer, 300)
    assert chosen != best, "upstream is mended: drop the choice that is not compiled"
    repair_cuts(indexer)
    chosen, best = token_choice(indexer, 300)
    assert chosen == best


# ---------------------------------------------------------------- layers for images


def test_upstream_still_has_a_text_without_images_attend_in_the_layers_for_images() -> None:
    model = made(MODELS["mllama"]())
    unlike = np.abs(logits(model, [TOKENS]) - logits(model, [150, 150])).max()
    assert unlike > 1e-3, "upstream is mended: drop the layer that is left out"


def test_a_layer_for_images_reads_images_alone() -> None:
    layer = made(mllama.MllamaCrossAttentionDecoderLayer(MllamaConfig(**MLLAMA), 1))
    image, text = hidden(5, 1), hidden(3)
    expected = layer(text, image, cache=KVCache())
    repair_cuts(layer)
    assert mx.array_equal(layer(text, image, cache=KVCache()), expected)
    assert mx.array_equal(layer(text, None, cache=KVCache()), text)


# ---------------------------------------------------------------- where repairs are made


def test_a_model_is_repaired_when_it_is_loaded(tmp_path: Path) -> None:
    config = V4 | {"model_type": "deepseek_v4", "vocab_size": 4096, "vision_n_layers": 1}
    config |= {"vision_dim": 32, "vision_n_heads": 2, "vision_inter_dim": 32}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(fixture_dir("qwen3_vl") / name, tmp_path / name)
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / "preprocessor_config.json", {})
    save_weights(tmp_path, vision_model(config).parameters())
    loaded = load_model(load_settings({"MODEL_PATH": str(tmp_path)}, None))
    window, *pooled = loaded.model.make_cache()[1].caches
    assert type(window) is OrderedRotatingKVCache
    assert [type(cache) for cache in pooled] == [OverlappedPoolingCache] * 2
    assert [type(cache) for cache in loaded.model.make_cache()[2].caches] == [
        *(type(window), PoolingCache)
    ]
    assert "OverlappedPoolingCache" in loaded.facts.cache_layout


# ---------------------------------------------------------------- positions


def test_a_prompt_gets_positions_of_its_own_whatever_prompt_was_before() -> None:
    model = loaded("mlx_vlm/hunyuan_vl").model.model
    new_cache = functools.partial(make_prompt_cache, model)
    ids = mx.array([[7 + n % 90 for n in range(40)]])
    alone = model(ids, cache=new_cache()).logits
    model(ids[:, :5], cache=new_cache())
    assert mx.array_equal(model(ids, cache=new_cache()).logits, alone)
    model.__class__, model._position_ids = hunyuan_vl.LanguageModel, None
    model(ids[:, :5], cache=new_cache())
    with pytest.raises(AssertionError):  # upstream is mended: drop _NewPositions
        model(ids, cache=new_cache())
