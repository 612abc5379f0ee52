"""Says what a draft model is asked for by an answer's drafter, and told by the engine."""

from collections.abc import Sequence
from typing import Any, Protocol


class ModelDrafts(Protocol):
    """Follows one sequence and says what a draft model makes of it.

    Owner: the inference thread.
    """

    @property
    def token_cost(self) -> float:
        """What a drafted token costs, in forwards of one row of the model that verifies it."""

    def take(self, start: int, tokens: Any, hidden: Any) -> None:
        """Take what the model made of `tokens`, arrays (n,) and (1, n, hidden), the first `start`.

        What was taken before is left out.
        """

    def look_at(self, cache: Sequence[Any] | None) -> None:
        """Let it see the model's KV of all tokens that were taken, layer by layer.

        It is called with None before that changes.
        """

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        """Return what may come behind the last known token, which is the sequence's number `place`.

        It is `tokens_max` tokens, or none where what the model made of the ones before is missing.
        """
