"""Puts rows of tokens into batches of nearly equal length. Counts only; no arrays.

A batch is padded to its longest row, and what is padding is computed in vain.
"""

from collections.abc import Sequence
from typing import Final

# Of a padded batch: what one forward takes in memory. A worker leaves so much free all the time
# (worker/setup/encoder_memory.py), and a single text may have as many.
TOKENS_MAX: Final = 8_192
# Of the masks that some models make, tokens by tokens for each row; a single row may take more.
SQUARE_MAX: Final = 16 << 20
MLX_CACHE_BYTES: Final = 256 << 20  # of freed arrays that the next forward takes again
WASTE_DIVISOR: Final = 4  # of a padded batch this part may be padding, and so much more:
WASTE_TOKENS: Final = 64


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
