"""Runs one rank of each family in turn and writes what it held and computed.

python -m scripts.bench.ranks.family_rank OUT NAME...   (of a ring where MLX_RANK is set)
"""

import copy
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from scripts.bench.ranks.family_configs import FAMILIES, VOCAB_SIZE
from scripts.fixtures.checkpoint_files import randomise

PROMPT_TOKENS: Final = 320
CHUNK: Final = 64
WARM_TOKENS: Final = 192  # where the warm prefill is taken up
SAMPLED_TOKENS: Final = 16


def array_bytes(tree: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(tree) if isinstance(array, mx.array))


def made(name: str) -> Any:
    """Return a family's model with random weights, the same ones in every process."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = copy.deepcopy(FAMILIES[name]) | {"model_type": name}
    model = module.Model(module.ModelArgs.from_dict(config))
    randomise(model)
    return model


def prefilled(model: Any, cache: list[Any], ids: list[int]) -> mx.array:
    """Feed `ids` chunk by chunk and return the last logits."""
    for start in range(0, len(ids), CHUNK):
        logits = model(mx.array([ids[start : start + CHUNK]]), cache=cache)
        mx.eval(logits, [layer.state for layer in cache])
    return logits[0, -1].astype(mx.float32)


def sampled(model: Any, cache: list[Any], logits: mx.array) -> list[int]:
    tokens = []
    for _ in range(SAMPLED_TOKENS):
        tokens.append(np.array(mx.argmax(logits)).item())
        logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1].astype(mx.float32)
    return tokens


def row_of(name: str, group: mx.distributed.Group | None) -> dict[str, Any]:
    """Return what this rank holds of a family, and what it computes or why it cannot."""
    model = made(name)
    if group is not None:
        model.shard(group)
        mx.eval(model.parameters())
    weights = model.parameters()
    row: dict[str, Any] = {"weight_bytes": array_bytes(weights)}
    row["layer_bytes"] = array_bytes([a for path, a in tree_flatten(weights) if "layers." in path])
    try:
        return row | computed(model)
    except RuntimeError as error:  # muse_spark's kernels are Metal's alone
        return row | {"error": str(error)}


def computed(model: Any) -> dict[str, Any]:
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist()
    cold, warm = make_prompt_cache(model), make_prompt_cache(model)
    logits = prefilled(model, cold, ids)
    prefilled(model, warm, ids[:WARM_TOKENS])
    again = prefilled(model, warm, ids[WARM_TOKENS:])
    return {
        "kv_bytes": array_bytes([layer.state for layer in cold]),
        "is_warm_cold": bool(mx.array_equal(logits, again)),
        "logits": np.array(logits).tolist(),
        "tokens": sampled(model, cold, logits),
    }


def main() -> None:
    out, *names = sys.argv[1:]
    group = mx.distributed.init(strict=True, backend="ring") if "MLX_RANK" in os.environ else None
    rows: dict[str, Any] = {}
    for name in names:
        rows[name] = row_of(name, group)
        Path(out).write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)  # a ring that is torn down waits for its neighbours


if __name__ == "__main__":
    main()
