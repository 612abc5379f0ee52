"""Says how long the forwards of a prefill are where nothing else cuts it: positions alone decide.

A forward takes more time and memory the more tokens come before it. A Mac's GPU aborts a command
that takes some seconds, and the display freezes until then.
"""

from dataclasses import dataclass
from typing import Final

FULL_TO: Final = 65_536  # tokens
STEP_MIN: Final = 256  # tokens
HEADER_GAP: Final = 64  # tokens: a message header closer to the last cut gets no cut of its own


@dataclass(frozen=True, slots=True)
class PrefillGrid:
    """The multiples of the chunk up to `full_to`, of half the chunk up to twice that, and so on.

    The product of a forward's length and its depth thus stays about what it is at `full_to`.
    Source: mlx-lm's pull request 1087 (step * 65536 / depth); here in halves, rounded down.
    Invariant: each step divides the earlier steps, so points are at most a chunk apart. Immutable.
    """

    chunk: int  # tokens
    step_min: int = STEP_MIN
    full_to: int = FULL_TO

    def step_at(self, position: int) -> int:
        """Return the distance between points at `position`."""
        assert self.chunk > 0 and self.full_to > 0, self
        step, limit = self.chunk, self.full_to
        while position >= limit and step % 2 == 0 and step // 2 >= self.step_min:
            step, limit = step // 2, limit * 2
        return step

    def points(self, end: int) -> list[int]:
        """Return the points between 0 and `end`, both excluded, ascending."""
        points: list[int] = []
        start, limit = 0, self.full_to
        while start < end:
            step = self.step_at(start)
            stop = end if self.step_at(limit) == step else min(end, limit)
            points += range(max(step, -(-start // step) * step), stop, step)
            start, limit = stop, limit * 2
        return points

    def is_point(self, position: int) -> bool:
        return position % self.step_at(position) == 0

    def step_ends(self, depth: int) -> list[int]:
        """Return the positions up to `depth` at which a step length ends; `depth` is the last."""
        step_ends, limit = [], self.full_to
        while limit < depth and self.step_at(limit) < self.step_at(limit - 1):
            step_ends.append(limit)
            limit *= 2
        return [*step_ends, depth]


WHOLE: Final = PrefillGrid(1 << 40)  # longer than any prompt: it has no points
