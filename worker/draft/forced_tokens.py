"""Says what the grammar of an answer is asked for: the tokens that it lets come alone."""

from collections.abc import Callable, Sequence
from typing import Protocol


class ForcedTokens(Protocol):
    """Follows one answer and knows where its grammar, or that of a call in it, leaves no choice.

    Owner: the inference thread.
    """

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""

    def forced(self, tokens_max: int) -> list[int]:
        """Return the tokens that must come next, at most so many; most often there is none."""

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of `tokens` may come behind `ahead`, and what must come behind them.

        Those are counted up to the first one behind which something must come. Where nothing is
        known all may come.
        """

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        """Return what says whether a token may come behind `ahead`, where one of few texts must.

        It is None elsewhere.
        """
