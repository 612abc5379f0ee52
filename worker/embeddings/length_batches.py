"""Puts rows of tokens into batches of nearly equal length, and bounds how long one takes.

A batch is padded to its longest row, and what is padding is computed in vain. Its forward holds the
GPU, so an answer that streams beside it, and a request that came later, wait for its end.
Counts only; no arrays.
"""

from collections.abc import Sequence
from typing import Final

# Of a text: a longer one's masks alone take gigabytes, as mlx-vlm makes them (tokens squared).
TEXT_TOKENS_MAX: Final = 8_192
# Of a padded batch: what one forward takes in memory. A worker leaves so much free all the time
# (worker/setup/memory_setup.py), and a single text may have as many.
TOKENS_MAX: Final = 8_192
# Of the masks that some models make, tokens by tokens for each row; a single row may take more.
SQUARE_MAX: Final = 16 << 20
MLX_CACHE_BYTES: Final = 256 << 20  # of freed arrays that the next forward takes again
WASTE_DIVISOR: Final = 4  # of a padded batch this part may be padding, and so much more:
WASTE_TOKENS: Final = 64
TOKENS_MIN: Final = 16
SHRINK_MIN: Final = 0.25  # one slow forward may be somebody else's doing
GROW: Final = 1.5
FULL: Final = 0.75  # of the tokens allowed, from which on a forward says that more would fit


class LengthBatches:
    """The rows of one request that have not been computed, the longest last.

    Invariant: each row is given out once. Rows of a batch stand side by side in order of length.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """Take each row's number of tokens."""
        self._lengths = lengths
        self._left = sorted(range(len(lengths)), key=lambda row: (lengths[row], -row))
        self.tokens_left = sum(lengths)

    @property
    def is_empty(self) -> bool:
        return not self._left

    def take(self, tokens_max: int) -> list[int]:
        """Return the numbers of the next rows: the longest, and as many as fit beside it.

        The batch is at most `tokens_max` tokens with its padding, or one row.
        """
        assert self._left, "nothing is left"
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
        assert self.tokens_left >= len(self._left), "each row has a token"
        return batch


class ForwardPace:
    """How many tokens a forward may have to end within `limit_s`, by what others took."""

    def __init__(self, limit_s: float, tokens: int) -> None:
        """`tokens` is the first guess."""
        self._limit_s = limit_s
        self.tokens = tokens

    def note(self, tokens: int, took_s: float) -> None:
        """Learn that a forward of so many tokens, its padding included, took so long."""
        allowed = self.tokens
        if tokens > allowed:
            return  # one long row, which had to be
        if took_s > self._limit_s:
            self.tokens = max(TOKENS_MIN, int(tokens * max(self._limit_s / took_s, SHRINK_MIN)))
        elif tokens >= allowed * FULL and took_s < self._limit_s / GROW:
            self.tokens = min(TOKENS_MAX, int(allowed * GROW))
