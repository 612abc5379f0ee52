"""Notes what routers of a mixture of experts think of each, and has one choose the next best.

Where two experts are as close as rounding is, either choice is right, and another text follows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

LEAST: Final = 1e-7  # of scores about one: what decides between two that are equal


@dataclass(frozen=True, slots=True)
class RouterScores:
    """What a router thought of the experts for some tokens (..., experts), and how many it took."""

    scores: np.ndarray
    chosen: int

    def edges(self, others: Sequence["RouterScores"], times: float) -> Iterator[np.ndarray]:
        """Yield for each token whose choice is closer than rounding what makes it the other one.

        `others` were rounded otherwise; `times` what moved them counts. Yields what to add to the
        scores (..., experts), zero but for one.
        """
        if self.chosen >= self.scores.shape[-1]:
            return
        last, runner_up = (np.argsort(self.scores)[..., -self.chosen - n] for n in (0, 1))
        margins = self._of(last) - self._of(runner_up)
        moved = np.max([np.abs(self.scores - o.scores).max(axis=-1) for o in others], axis=0)
        for token in np.argwhere(margins < 2 * times * moved):  # both of two scores may move
            nudge = np.zeros_like(self.scores)
            nudge[(*token, runner_up[tuple(token)])] = 2 * margins[tuple(token)] + LEAST
            yield nudge

    def _of(self, experts: np.ndarray) -> np.ndarray:
        return np.take_along_axis(self.scores, experts[..., None], axis=-1)[..., 0]


class Watched(nn.Module):
    """A router that notes its scores for each token; `nudges` are added to them, by call."""

    def __init__(
        self,
        router: Any,
        chosen: int,
        noted: list[RouterScores],
        nudges: Mapping[int, np.ndarray],
    ) -> None:
        super().__init__()
        self.router = router
        self.chosen = chosen
        self._noted = noted
        self._nudges = nudges

    def __call__(self, x: mx.array) -> Any:
        if isinstance(self.router, nn.QuantizedLinear):
            scores = self.router(x)
        else:
            scores = x @ self.router.weight.T
            if "bias" in self.router:
                scores = scores + self.router.bias
        if "e_score_correction_bias" in self.router:
            scores = mx.sigmoid(scores) + self.router.e_score_correction_bias
        number = len(self._noted)
        self._noted.append(RouterScores(np.array(scores.astype(mx.float32)), self.chosen))
        return self._routed(x, self._nudges.get(number))

    def _routed(self, x: mx.array, nudge: np.ndarray | None) -> Any:
        if nudge is None:
            return self.router(x)
        if "e_score_correction_bias" not in self.router:
            return self.router(x) + mx.array(nudge)
        bias = self.router.e_score_correction_bias  # it returns its choice: all tokens are nudged
        self.router.e_score_correction_bias = bias + mx.array(nudge).reshape(-1, len(bias)).sum(0)
        routed = self.router(x)
        self.router.e_score_correction_bias = bias
        return routed


@contextmanager
def watched_routers(
    network: nn.Module, nudges: Mapping[int, np.ndarray]
) -> Iterator[list[RouterScores]]:
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
                setattr(module, part, Watched(router, chosen, noted, nudges))
    try:
        yield noted
    finally:
        for module, part, router in kept:
            setattr(module, part, router)
