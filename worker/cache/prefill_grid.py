"""Says how long the forwards of a prefill are where nothing else cuts it: positions alone decide.

A forward takes the longer, and the more memory, the more tokens stand before it. A Mac's GPU ends a
command that takes some seconds, and its display stands still meanwhile.
"""

from dataclasses import dataclass
from typing import Final

FULL_TO: Final = 65_536  # tokens
STEP_MIN: Final = 256  # tokens
HEADER_GAP: Final = 64  # tokens: a message's header closer to the last cut is not worth a forward


@dataclass(frozen=True, slots=True)
class PrefillGrid:
    """Multiples of the chunk to `full_to`, of its half to twice as far, and so on. Immutable.

    So a forward times its depth stays about what it is at `full_to`.
    Source: mlx-lm's pull request 1087 (step * 65536 / depth); here in halves, rounded down.
    Invariant: each step divides those before it, so no two points are further apart than a chunk.
    """

    chunk: int  # tokens
    step_min: int = STEP_MIN
    full_to: int = FULL_TO

    def step_at(self, position: int) -> int:
        """Return how far the points are apart at `position`, and behind it as long as it lasts."""
        assert self.chunk > 0 and self.full_to > 0, self
        step, limit = self.chunk, self.full_to
        while position >= limit and step % 2 == 0 and step // 2 >= self.step_min:
            step, limit = step // 2, limit * 2
        return step

    def points(self, end: int) -> list[int]:
        """Return the points between 0 and `end`, ascending; neither is one."""
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

    def turns(self, depth: int) -> list[int]:
        """Return the depths, `depth` the last, where a step is as deep as it gets."""
        turns, limit = [], self.full_to
        while limit < depth and self.step_at(limit) < self.step_at(limit - 1):
            turns.append(limit)
            limit *= 2
        return [*turns, depth]


WHOLE: Final = PrefillGrid(1 << 40)  # longer than any prompt: it has no points
