"""Groups token rows of similar length into batches, and limits the time of a batch's forward.

A batch is padded to its longest row, and padding is computed in vain. A forward occupies the GPU,
so answers that stream and later requests wait for its end.
This module handles counts only, no arrays.
"""

from collections.abc import Sequence
from typing import Final

# Tokens of one text. Mlx-vlm's masks grow with their square, to gigabytes for a longer text.
TEXT_TOKENS_MAX: Final = 8_192
# Tokens of a padded batch. This bounds a forward's memory, which a worker keeps free
# (worker/setup/memory_setup.py). A single text may have as many tokens.
TOKENS_MAX: Final = 8_192
# Elements of a batch's masks, which some models make: the square of the padded length for each row.
# A single row may have more.
SQUARE_MAX: Final = 16 << 20
MLX_CACHE_BYTES: Final = 256 << 20  # freed arrays that MLX keeps for the next forward
WASTE_DIVISOR: Final = 4  # a quarter of a padded batch may be padding
WASTE_TOKENS: Final = 64  # tokens that may be padding beyond that quarter
TOKENS_MIN: Final = 16
SHRINK_MIN: Final = 0.25  # least factor of one step: a slow forward may have another cause
GROW: Final = 1.5
FULL: Final = 0.75  # a forward with this share of the allowed tokens may raise the limit


class LengthBatches:
    """The rows of one request that are not computed yet.

    Invariant: each row is returned once. The rows of a batch are neighbours in order of length.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` has the number of tokens of each row."""
        self._lengths = lengths
        self._left = sorted(range(len(lengths)), key=lambda row: (lengths[row], -row))
        self.tokens_left = sum(lengths)

    @property
    def is_empty(self) -> bool:
        return not self._left

    def take(self, tokens_max: int) -> list[int]:
        """Return the indices of the next batch's rows: the longest left, and as many more as fit.

        The batch has at most `tokens_max` tokens with its padding, or is a single row.
        """
        assert self._left, "all rows are taken"
        batch = [self._left.pop()]
        longest = real = self._lengths[batch[0]]
        while self._left:
            length, padded = self._lengths[self._left[-1]], longest * (len(batch) + 1)
            is_large = padded > min(tokens_max, TOKENS_MAX) or padded * longest > SQUARE_MAX
            waste = padded - real - length
            if is_large or waste > padded // WASTE_DIVISOR + WASTE_TOKENS:
                break
            batch.append(self._left.pop())
            real += length
        self.tokens_left -= real
        assert self.tokens_left >= len(self._left), "fewer tokens are left than rows"
        return batch


class ForwardPace:
    """Learns from measured forwards how many tokens a forward of `limit_s` may have."""

    def __init__(self, limit_s: float, tokens: int) -> None:
        """`tokens` is the first guess of that number."""
        self._limit_s = limit_s
        self.tokens = tokens

    def record(self, tokens: int, took_s: float) -> None:
        """Learn from a forward of `tokens`, padding included, that took `took_s`."""
        allowed = self.tokens
        if tokens > allowed:
            return  # a single row that is longer than allowed
        if took_s > self._limit_s:
            self.tokens = max(TOKENS_MIN, int(tokens * max(self._limit_s / took_s, SHRINK_MIN)))
        elif tokens >= allowed * FULL and took_s < self._limit_s / GROW:
            self.tokens = min(TOKENS_MAX, int(allowed * GROW))
