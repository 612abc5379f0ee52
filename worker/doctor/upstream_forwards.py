"""Runs a model's forwards as mlx-lm would, nothing of Hearth between: what checks compare with.

Two answers to the same tokens are compared here too: to the bit, by greedy tokens, by how much.

Owner: the inference thread.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from hearth.worker.doctor.findings import Figure
from hearth.worker.engine.decode.sampler import Sampler

Logprobs = NDArray[np.float32]  # (tokens, vocabulary)
Forwards = Generator[None, None, "Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The log probabilities that each token of an answer was chosen by."""

    logprobs: Logprobs

    @property
    def tokens(self) -> list[int]:
        """The greedy tokens."""
        return [int(token) for token in self.logprobs.argmax(axis=-1)]


class UpstreamSequence:
    """One sequence in a cache of its own. Every generator yields behind each forward."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.cache: list[Any] = make_prompt_cache(model)

    def read(self, ids: Sequence[int], ends: Sequence[int]) -> Generator[None]:
        """Feed `ids` up to the last of `ends`, a forward to each."""
        start = 0
        for end in ends:
            assert start < end <= len(ids), (start, end, len(ids))
            self._model(mx.array(list(ids[start:end]))[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
            mx.clear_cache()
            start = end
            yield

    def answer(self, tail: Sequence[int], count: int, forced: Sequence[int] = ()) -> Forwards:
        """Feed `tail`, then a token at a time; the tokens are greedy, or `forced`.

        The last token that is chosen is not fed.
        """
        rows: list[Logprobs] = []
        inputs = list(tail)
        for number in range(count):
            logits = self._model(mx.array(inputs)[None], cache=self.cache)[:, -1, :]
            rows.append(as_numbers(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
            inputs = [forced[number] if forced else int(rows[-1].argmax())]
            yield
        return Answer(np.stack(rows))


def cold_answer(
    model: Any, ids: Sequence[int], cuts: Sequence[int], count: int, forced: Sequence[int] = ()
) -> Forwards:
    """Read a prompt in the forwards that end at `cuts`; return what is answered."""
    sequence = UpstreamSequence(model)
    yield from sequence.read(ids, cuts)
    return (yield from sequence.answer(ids[cuts[-1] if cuts else 0 :], count, forced))


def as_numbers(logprobs: mx.array) -> Logprobs:
    return np.array(logprobs.astype(mx.float32)).reshape(-1)


def forced_choice(tokens: Sequence[int], rows: list[Any]) -> Sampler:
    """Return a sampler that says `tokens` one after another, and the last one ever after.

    It puts the log probabilities (1, vocabulary) that it sees for each of them into `rows`.
    """

    def sample(logprobs: mx.array, places: Sequence[int]) -> mx.array:
        for row, place in enumerate(places):
            assert place == len(rows), (place, len(rows))
            rows.append(logprobs[row : row + 1])
        said = [tokens[min(place, len(tokens) - 1)] for place in places]
        return mx.array(said, dtype=mx.uint32)

    return sample


# Of the spread of a row of log probabilities: what rounding may do at most, by the weights' type.
ROUNDING: Final = {"float32": 1e-3}
ROUNDING_OF_16_BITS: Final = 0.25
# No less counts as beyond rounding, however little another cut of the same model changed.
FLOOR: Final = {"float32": 1e-4}
FLOOR_OF_16_BITS: Final = 0.03
NOISE_FACTOR: Final = 4.0  # how much further than another cut of the same tokens may lie


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one answer's log probabilities are from another's."""

    tokens: int  # compared
    equal_tokens: int  # of these: the same greedy one
    largest: float  # of one log probability; NaN where one is no number
    relative: float  # the largest, over the spread of its row

    @property
    def is_none(self) -> bool:
        return self.largest == 0

    @property
    def has_other_tokens(self) -> bool:
        return self.equal_tokens < self.tokens

    def figures(self) -> dict[str, Figure]:
        return {
            "tokens": self.tokens,
            "equal_tokens": self.equal_tokens,
            "bits_equal": self.is_none,
            "largest": self.largest,
            "relative": self.relative,
        }

    def __str__(self) -> str:
        same = f"{self.equal_tokens} of {self.tokens} tokens are the same"
        return f"{same}, log probabilities differ by up to {self.largest:.3g}"


def difference(one: Answer, other: Answer) -> Difference:
    """Return how far `one` is from `other`, whose rows stand for the same tokens."""
    a, b = one.logprobs, other.logprobs
    assert a.shape == b.shape, (a.shape, b.shape)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0, np.abs(a - b)).max(axis=-1)
        spread = np.maximum(b.std(axis=-1), 1e-6)
    equal = int((a.argmax(axis=-1) == b.argmax(axis=-1)).sum())
    return Difference(len(a), equal, float(apart.max()), float((apart / spread).max()))


def together(parts: list[Difference]) -> Difference:
    """Return the differences of several answers as one."""
    return Difference(
        sum(part.tokens for part in parts),
        sum(part.equal_tokens for part in parts),
        _largest([part.largest for part in parts]),
        _largest([part.relative for part in parts]),
    )


def rounding_limit(dtype: str, noise: float | None = None) -> float:
    """Return which relative difference is beyond rounding.

    `noise` is what another cut of the same tokens changed, where that is known: a model that
    rounds less is held to less.
    """
    highest = ROUNDING.get(dtype, ROUNDING_OF_16_BITS)
    if noise is None or not math.isfinite(noise):
        return highest
    return min(highest, max(FLOOR.get(dtype, FLOOR_OF_16_BITS), NOISE_FACTOR * noise))


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
