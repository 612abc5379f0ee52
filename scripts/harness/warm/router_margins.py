"""Measures how close a mixture-of-experts router came to a tie, which excuses a different token."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import load


class Watched(nn.Module):
    """A router that notes, for each token, by how much the last expert chosen beat the next."""

    def __init__(self, router: Any, chosen: int, margins: list[float]) -> None:
        super().__init__()
        self.router = router
        self.chosen = chosen
        self._margins = margins

    def __call__(self, x: mx.array) -> Any:
        scores = x @ self.router.weight.T
        if "bias" in self.router:
            scores = scores + self.router.bias
        if "e_score_correction_bias" in self.router:
            scores = mx.sigmoid(scores) + self.router.e_score_correction_bias
        ordered = np.sort(np.array(scores.astype(mx.float32)), axis=-1)
        margin = ordered[..., -self.chosen] - ordered[..., -self.chosen - 1]
        self._margins.append(float(margin.min()))
        return self.router(x)


@functools.cache
def watched_model(directory: Path) -> tuple[Any, list[float]]:
    """Return the model with its routers watched, and the list that they write to."""
    model: Any = load(str(directory))[0]
    margins: list[float] = []
    for _, module in model.named_modules():
        chosen = getattr(module, "num_experts_per_tok", None) or getattr(module, "top_k", None)
        for part in ("router", "gate"):
            router = getattr(module, part, None)
            if chosen and router is not None and "weight" in router:
                chosen = getattr(router, "top_k", chosen)
                setattr(module, part, Watched(router, chosen, margins))
    return model, margins


def narrowest_margin(directory: Path, ids: Sequence[int]) -> float:
    """Return the smallest margin of any router over `ids`; infinite without experts."""
    model, margins = watched_model(directory)
    margins.clear()
    mx.eval(model(mx.array([list(ids)])))
    return min(margins, default=float("inf"))
