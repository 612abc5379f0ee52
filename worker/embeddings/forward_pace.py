"""Bounds how long one forward takes, by what the ones before took. Counts only; no arrays.

A forward holds the GPU, so an answer that streams beside it, and a request that came later, wait
for its end.
"""

from typing import Final

from hearth.worker.embeddings.length_batches import TOKENS_MAX

TOKENS_MIN: Final = 16
SHRINK_MIN: Final = 0.25  # one slow forward may be somebody else's doing
GROW: Final = 1.5
FULL: Final = 0.75  # of the tokens allowed, from which on a forward says that more would fit


class ForwardPace:
    """How many tokens a forward may have to end within `limit_s`."""

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
