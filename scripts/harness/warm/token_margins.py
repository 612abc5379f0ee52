"""Compares greedy tokens of two answers, but where rounding alone may choose another one: a tie.

Other cuts, batches and drafts round otherwise, as another BLAS does. How far that reaches is
measured where two answers part, without what is under test: the cold machine reads the same tokens
in the same cuts and without a cache, its embeddings scaled by a last bit or not. Log probabilities
that lie farther apart are a fault, however close the two tokens are. Ties are counted in COUNTED,
and `tests/helpers/tie_count.py` holds how many there may be.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from hearth.worker.engine.prefill_lengths import network_of
from scripts.harness.socketless_worker import Answer, Machine

BITS: Final = (-2, -1, 1, 2)  # in units of the last one: by how much embeddings are scaled
# By how much more often the rest is rounded than embeddings: 0 to 1.8 of what a bit of these moves,
# over 240 rows of 15 models, their cuts and drafts, under OpenBLAS.
ROUNDED_MORE: Final = 4.0
LEAST: Final = 1e-7  # of a router's scores, about one: what decides between two that are equal


@dataclass
class Counted:
    """What was compared in this process. Owner: the thread that compares."""

    exact: int = 0  # answers that were compared to the bit
    answers: int = 0  # by tokens
    tokens: int = 0
    ties: list[str] = field(default_factory=list)

    def take(self) -> "Counted":
        """Return what was counted, and begin anew."""
        told = replace(self)
        self.exact, self.answers, self.tokens, self.ties = 0, 0, 0, []
        return told


COUNTED: Final = Counted()


def same_bits(answer: Answer, cold: Answer) -> None:
    """Assert that two answers' log probabilities are the same to the bit, and so their tokens."""
    COUNTED.exact += 1
    assert len(answer.logits) == len(cold.logits)
    for mine, theirs in zip(answer.logits, cold.logits, strict=True):
        assert np.array_equal(mine, theirs), nearest(mine, [theirs])


def same_tokens(answer: Answer, cold: Answer) -> int:
    """Assert that two answers to one prompt say the same, up to a tie of the cold one.

    Return up to where they do. What follows a tie is another text, and compared no more.
    """
    pairs = list(zip(answer.tokens, cold.tokens, strict=True))
    at = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))
    COUNTED.answers += 1
    COUNTED.tokens += min(at + 1, len(pairs))
    if at < len(pairs):
        rounding, routed_otherwise = measured(cold, at)
        moved = nearest(answer.logits[at], [cold.logits[at], *routed_otherwise])
        margin = cold.logits[at].max() - cold.logits[at][pairs[at][0]]
        told = (
            f"token {at} is {pairs[at][0]} and not {pairs[at][1]}, {margin:.1e} less likely; "
            f"the row is {moved:.1e} off, rounding moves it by {rounding:.1e}"
        )
        assert moved <= ROUNDED_MORE * rounding, told
        COUNTED.ties.append(told)
    return at


def nearest(row: np.ndarray, others: Sequence[np.ndarray]) -> float:
    return min(float(np.abs(row - other).max()) for other in others)


def measured(cold: Answer, at: int) -> tuple[float, list[np.ndarray]]:
    """Return how far a last bit moves the log probabilities of a cold answer's token `at`.

    And these log probabilities (vocabulary,) where one expert is the next best, for each choice of
    experts that rounding decides. Then a bit may move them from one of them to the other.
    """
    plain, scores = read(cold, at)
    scaled = [read(cold, at, bits=bits) for bits in BITS]
    otherwise = [
        read(cold, at, nudges={number: nudge})[0]
        for number, (one, *others) in enumerate(zip(scores, *(s for _, s in scaled), strict=True))
        for nudge in one.edges(others, ROUNDED_MORE)
    ]
    return max(nearest(row, [plain, *otherwise]) for row, _ in scaled), otherwise


def read(
    cold: Answer, at: int, *, bits: int = 0, nudges: Mapping[int, np.ndarray] = {}
) -> tuple[np.ndarray, list["RouterScores"]]:
    """Read a cold answer's prompt and first `at` tokens.

    Embeddings are scaled by so many last bits, routers nudged. Return the next token's log
    probabilities (vocabulary,) and all scores of routers.
    """
    request, machine = cold.request, cold.machine
    network = network_of(machine.loaded)
    query, ids = request.query, [*request.ids, *cold.tokens[:at]]
    with scaled_embeddings(network, bits), watched_routers(network, nudges) as scores:
        again = Machine.submit(
            machine, ids, 1, query.images, adapter=query.adapter, uses_cache=False
        )
        machine.run()
    return machine.settled(again).logits[0], scores


def scaled_embeddings(network: nn.Module, bits: int) -> AbstractContextManager[None]:
    """Have `network` embed tokens, and where it does so by these weights name them, a bit off."""
    scaled = [
        (module, name, module[name] * (1 + bits * mx.finfo(module[name].dtype).eps))
        for _, module in network.named_modules()
        if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
        for name in [name for name in ("scales", "biases") if name in module] or ["weight"]
    ]
    assert scaled, "no embeddings"
    return _replaced(scaled)


@contextmanager
def _replaced(parts: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Have modules hold these parts by these names, and their own again behind it."""
    with ExitStack() as stack:
        for module, name, part in parts:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, part)
        yield


# ---------------------------------------------------------------- mixtures of experts
# Where two experts are as close as rounding is, either choice is right, and another text follows.


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
        runner_up = np.argsort(self.scores)[..., -self.chosen - 1]
        margins = np.diff(np.sort(self.scores))[..., -self.chosen]  # of the last one over it
        moved = np.max([np.abs(self.scores - o.scores).max(axis=-1) for o in others], axis=0)
        for token in map(tuple, np.argwhere(margins < 2 * times * moved)):  # both may move
            nudge = np.zeros_like(self.scores)
            nudge[(*token, runner_up[token])] = 2 * margins[token] + LEAST
            yield nudge


@dataclass(frozen=True, slots=True)
class Watched:
    """A router that notes its scores for each token; `nudges` are added to them, by call."""

    router: Any
    chosen: int
    noted: list[RouterScores]
    nudges: Mapping[int, np.ndarray]

    def __call__(self, x: mx.array) -> Any:
        router, bias = self.router, self.router.get("e_score_correction_bias")
        scores = (
            router(x)
            if isinstance(router, nn.QuantizedLinear)
            else x @ router.weight.T + router.get("bias", 0)
        )
        if bias is not None:
            scores = mx.sigmoid(scores) + bias
        nudge = self.nudges.get(len(self.noted))
        self.noted.append(RouterScores(np.array(scores.astype(mx.float32)), self.chosen))
        if nudge is None or bias is None:
            return router(x) if nudge is None else router(x) + mx.array(nudge)
        # It returns its choice: all tokens are nudged.
        nudged = bias + mx.array(nudge).reshape(-1, len(bias)).sum(0)
        with _replaced([(router, "e_score_correction_bias", nudged)]):
            return router(x)


@contextmanager
def watched_routers(
    network: nn.Module, nudges: Mapping[int, np.ndarray]
) -> Iterator[list[RouterScores]]:
    """Yield the list that the routers of `network` write to; empty without experts."""
    noted: list[RouterScores] = []
    watched = [
        (module, part, Watched(router, getattr(router, "top_k", chosen), noted, nudges))
        for _, module in network.named_modules()
        if (chosen := getattr(module, "num_experts_per_tok", 0) or getattr(module, "top_k", 0))
        for part in ("router", "gate")
        if "weight" in (router := getattr(module, part, None) or ())
    ]
    with _replaced(watched):
        yield noted
