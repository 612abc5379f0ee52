"""Compares two answers to the same tokens: to the bit, by their greedy tokens, by how much."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from hearth.worker.doctor.findings import Figure
from hearth.worker.doctor.upstream_forwards import Answer

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


NOTHING: Final = Difference(0, 0, 0.0, 0.0)


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
