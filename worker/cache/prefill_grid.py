"""Sets the lengths of a prefill's forwards, by their positions alone, where nothing else cuts.

The more tokens come before a forward, the more time and memory the forward takes. A Mac's GPU
aborts a command that takes some seconds, and the display freezes until then.
"""

from dataclasses import dataclass
from typing import Final

FULL_TO: Final = 65_536  # tokens before which forwards have full length
STEP_MIN: Final = 256  # least length of a forward, in tokens
HEADER_GAP: Final = 64  # least distance of a message header from the last cut to get its own cut


@dataclass(frozen=True, slots=True)
class PrefillGrid:
    """The multiples of the chunk up to `full_to`, of half a chunk up to twice `full_to`, and so on.

    After `full_to`, the product of a forward's length and its depth thus stays about the same.
    Source: mlx-lm's pull request 1087 (step * 65536 / depth), with the steps rounded to halves.
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
        """Return the positions at which a step length ends, up to `depth`, which is the last."""
        step_ends, limit = [], self.full_to
        while limit < depth and self.step_at(limit) < self.step_at(limit - 1):
            step_ends.append(limit)
            limit *= 2
        return [*step_ends, depth]


WHOLE: Final = PrefillGrid(1 << 40)  # a grid without points: its chunk is longer than any prompt
