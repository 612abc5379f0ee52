"""A converted SmolLM2 is its GGUF file: each weight, each token, and what it answers."""

import hashlib
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, strategies as st
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.utils import dequantize_model

from hearth.commands.models.convert_smollm2 import row_order
from hearth.commands.server.find_or_start import context_in_files
from hearth.shared.models.model_path import SMOLLM2
from tests.helpers.models.real_weights import real_weights

# Of all weights as gguf 0.19.0 dequantises the file's tensors, in float32 (`gguf.dequantize`), the
# rows of q and k in MLX's order, in the order of MLX's names.
WEIGHTS_SHA256: Final = "1e7c8a1c726e693f3ef812fec44c0efdf79020fe1e36d5cd8a07e0341da3e3aa"
# Ids by the rules of llama.cpp's `smollm`: single digits, then GPT-2's words, then the merges.
TOKENS: Final = {
    "x = 3.14\n\n    9": [104, 446, 216, 35, 30, 33, 36, 35988, 41],
    "don't\t2024 ²é": [12420, 982, 197, 34, 32, 34, 36, 216, 19133, 2756],
    "<|im_end|>\nЯ🙂 日本": [2, 198, 155, 124, 10813, 38887, 17097, 241, 115, 40993],
}


@given(heads=st.integers(1, 4), half=st.integers(1, 4), columns=st.integers(1, 3))
def test_rows_that_are_turned_together_come_apart_by_half_a_head(
    heads: int, half: int, columns: int
) -> None:
    rows = np.arange(heads * 2 * half * columns).reshape(-1, columns)
    counts = {"attn_q": heads, "attn_k": heads + 1}
    ordered = np.array(row_order("blk.0.attn_q.scales", mx.array(rows), counts))
    for row, got in enumerate(ordered):
        head, part, pair = row // (2 * half), row % (2 * half) // half, row % half
        assert got.tolist() == rows[head * 2 * half + 2 * pair + part].tolist()
    assert np.array_equal(np.array(row_order("blk.0.attn_v.weight", mx.array(rows), counts)), rows)


@pytest.fixture(scope="module")
def directory() -> Path:
    return real_weights("smollm2")


@pytest.fixture(scope="module")
def dense(directory: Path) -> tuple[Any, Any]:
    """Return the model in float32 without codes, and its tokenizer.

    MLX dequantises in the dtype of the scales: float16 would round.
    """
    model, tokenizer, *_ = load(str(directory))
    model.set_dtype(mx.float32)
    return dequantize_model(model), tokenizer


@pytest.mark.weights
def test_every_weight_is_what_gguf_reads(dense: tuple[Any, Any]) -> None:
    digest = hashlib.sha256()
    for _, array in sorted(tree_flatten(dense[0].parameters())):
        assert array.dtype == mx.float32
        digest.update(np.array(array).tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


@pytest.mark.weights
def test_its_context_is_what_is_told_before_it_is_fetched(directory: Path) -> None:
    assert context_in_files(str(directory)) == SMOLLM2.context_tokens


@pytest.mark.weights
@pytest.mark.parametrize("text", TOKENS)
def test_texts_have_the_ids_of_its_makers(dense: tuple[Any, Any], text: str) -> None:
    assert dense[1].encode(text, add_special_tokens=False) == TOKENS[text]
