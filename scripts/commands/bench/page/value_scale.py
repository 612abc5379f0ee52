"""Maps values to places along an axis, and chooses the values that its ticks stand at."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LOG_FROM: Final = 30.0  # times the least value: from there on a straight scale hides the small
LEFT, RIGHT = 2.5, 94.0  # per cent of the plot's width, so that marks at the ends are whole
TICKS_MAX: Final = 5
LEAST: Final = 1e-12  # what is less has no ticks
STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class ValueScale:
    """An axis from `low` to `high`. A straight one begins at 0, so that lengths compare."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], *, can_be_log: bool = True) -> "ValueScale":
        """Return an axis that has all values."""
        found = [each for each in values if math.isfinite(each)]
        high, low = max(found, default=0.0), min(found, default=0.0)
        if can_be_log and low > 0 and high / low > LOG_FROM:
            return cls(low, high, True)
        return cls(min(0.0, low), high if high > LEAST else 1.0)

    def place(self, value: float) -> float:
        """Return where a value stands, in per cent of the width."""
        assert not self.is_log or value > 0, value
        first, last, at = (self._bent(each) for each in (self.low, self.high, value))
        share = (at - first) / (last - first) if last > first else 0.5
        return round(LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, share)), 2)

    def ticks(self) -> list[float]:
        """Return round values on the axis, a few."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            every = max(1, math.ceil(len(powers) / TICKS_MAX))
            return [10.0**power for power in powers][::every]
        step = _round_step((self.high - self.low) / (TICKS_MAX - 1))
        first = math.ceil(self.low / step)
        return [at * step for at in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _bent(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def _round_step(least: float) -> float:
    """Return the least of 1, 2, 2.5 and 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in STEPS if step * power >= least * (1 - 1e-9))
