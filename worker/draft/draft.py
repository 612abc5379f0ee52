"""Says what a draft is, what proposes one, and what is asked of those that know what may come.

Tokens alone: nothing here knows a model or an array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# Where a drafted token comes from: the grammar of a call or an answer, the text of the own
# conversation, the client's prediction, the same API key's earlier answers, a model that drafts.
DraftSource = Literal["forced", "history", "prediction", "answers", "model"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, as a tree; a chain is a tree without branches. Immutable.

    Node n is `tokens[n]`, behind the node `parents[n]` < n, or behind all that is known where that
    is -1; no two children of a node are alike. `sources[n]` says where it comes from.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[DraftSource, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.sources), self

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def cut(self, length: int) -> "Draft":
        """Return its first `length` nodes."""
        return Draft(self.tokens[:length], self.parents[:length], self.sources[:length])


NO_DRAFT = Draft()


def chain(tokens: Sequence[int], sources: Sequence[DraftSource]) -> Draft:
    """Return a draft without branches."""
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(sources))


class Drafter(Protocol):
    """Drafts for one answer. Owner: the inference thread.

    The engine gives it each token of the answer, in order, and tells what became of each draft
    that it verified, before the tokens that came of it.
    """

    def take(self, tokens: Sequence[int]) -> None:
        """Take the answer's next tokens."""

    def is_promising(self) -> bool:
        """Whether a draft may be had once the next token, which is computed now, is known."""

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        """Return what may come behind all tokens so far, `tokens_max` nodes at most.

        `waiting` are the rows that the forward feeds in any case, 1 at least. An empty draft is
        plain decoding.
        """

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        """Learn which of the draft's nodes were right, and the rows of the forward that told so."""


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
