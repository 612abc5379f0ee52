"""Notes how close a mixture-of-experts router came to a tie, which excuses a different token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np


@dataclass(frozen=True, slots=True)
class RouterScores:
    """What a router thought of the experts for some tokens (..., experts), and how many it took."""

    scores: np.ndarray
    chosen: int

    def margins(self) -> np.ndarray:
        """Return by how much the last expert chosen beat the next, for each token."""
        ordered = np.sort(self.scores, axis=-1)
        margin: np.ndarray = ordered[..., -self.chosen] - ordered[..., -self.chosen - 1]
        return margin


def is_on_edge(one: RouterScores, other: RouterScores, times: float) -> bool:
    """Whether for some token the choice is closer than `times` what moved one to the other."""
    moved = np.abs(one.scores - other.scores).max(axis=-1)
    return bool((one.margins() < 2 * times * moved).any())  # both of two scores may move


class Watched(nn.Module):
    """A router that notes its scores for each token."""

    def __init__(self, router: Any, chosen: int, noted: list[RouterScores]) -> None:
        super().__init__()
        self.router = router
        self.chosen = chosen
        self._noted = noted

    def __call__(self, x: mx.array) -> Any:
        if isinstance(self.router, nn.QuantizedLinear):
            scores = self.router(x)
        else:
            scores = x @ self.router.weight.T
            if "bias" in self.router:
                scores = scores + self.router.bias
        if "e_score_correction_bias" in self.router:
            scores = mx.sigmoid(scores) + self.router.e_score_correction_bias
        self._noted.append(RouterScores(np.array(scores.astype(mx.float32)), self.chosen))
        return self.router(x)


@contextmanager
def watched_routers(network: nn.Module) -> Iterator[list[RouterScores]]:
    """Yield the list that the routers of `network` write to; empty without experts."""
    noted: list[RouterScores] = []
    kept: list[tuple[Any, str, Any]] = []
    for _, module in network.named_modules():
        chosen = getattr(module, "num_experts_per_tok", None) or getattr(module, "top_k", None)
        for part in ("router", "gate"):
            router = getattr(module, part, None)
            if chosen and router is not None and "weight" in router:
                kept.append((module, part, router))
                chosen = getattr(router, "top_k", chosen)
                setattr(module, part, Watched(router, chosen, noted))
    try:
        yield noted
    finally:
        for module, part, router in kept:
            setattr(module, part, router)
