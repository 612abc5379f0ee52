"""Defines a draft, and the protocols of the drafter and of its sources.

This module handles tokens only, no models and no arrays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# Where a drafted token comes from: "forced" by the grammar of a tool call or an answer, the
# conversation's own "history", the client's "prediction", earlier "answers" to the same API key, or
# a draft "model".
DraftSource = Literal["forced", "history", "prediction", "answers", "model"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, as a tree. A chain is a tree without branches. Immutable.

    Node n is `tokens[n]`, a child of the node `parents[n]` < n; -1 stands for the known tokens. No
    two children of a node are equal. `sources[n]` is the source of node n.
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
        """Return the draft's first `length` nodes."""
        return Draft(self.tokens[:length], self.parents[:length], self.sources[:length])


NO_DRAFT = Draft()


def chain(tokens: Sequence[int], sources: Sequence[DraftSource]) -> Draft:
    """Return a draft without branches."""
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(sources))


class Drafter(Protocol):
    """Drafts for one answer. Owner: the inference thread.

    The engine passes each token of the answer to `take`, in order. For a verified draft it first
    calls `record`, then `take` with the accepted tokens.
    """

    def take(self, tokens: Sequence[int]) -> None:
        """Append the answer's next tokens."""

    def is_promising(self) -> bool:
        """Whether a draft is likely after the token that is being computed now."""

    def propose(self, tokens_max: int, known_rows: int) -> Draft:
        """Return a draft of at most `tokens_max` nodes that continues all tokens so far.

        `known_rows` is how many known tokens the forward feeds before the draft, at least 1. An
        empty draft means plain decoding.
        """

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        """Learn which nodes of the draft a forward of `rows` tokens accepted."""


class ForcedTokens(Protocol):
    """Follows one answer, and finds tokens that the grammar of the answer or a tool call forces.

    Owner: the inference thread.
    """

    def take(self, tokens: Sequence[int]) -> None:
        """Append the answer's next tokens."""

    def forced(self, tokens_max: int) -> list[int]:
        """Return the tokens that must come next, at most `tokens_max`; mostly none."""

    def fitting(self, ahead: Sequence[int], tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of `tokens` may follow `ahead`, and the tokens forced after them.

        The count ends at the first token after which other tokens are forced. Where the grammar is
        unknown, all tokens may come.
        """

    def choice(self, ahead: Sequence[int]) -> Callable[[int], bool] | None:
        """Return a test of whether a token may follow `ahead`.

        It is None unless the grammar allows only a few texts.
        """


class ModelDrafts(Protocol):
    """Drafts for one sequence by a draft model.

    Owner: the inference thread.
    """

    @property
    def token_cost(self) -> float:
        """The cost of a drafted token, in forwards of one token of the main model."""

    def take(self, start: int, tokens: Any, hidden: Any) -> None:
        """Take the main model's hidden states (1, n, hidden) of `tokens` (n,).

        `start` is the position of the first token. Tokens that were taken before are skipped.
        """

    def look_at(self, cache: Sequence[Any] | None) -> None:
        """Give access to the main model's KV of all tokens taken, one cache for each layer.

        The call with None ends this access, before the KV changes.
        """

    def draft(self, position: int, last: int, tokens_max: int) -> list[int]:
        """Return `tokens_max` tokens that may follow `last`, the last known token.

        `position` is the position of `last` in the sequence. The list is empty if the hidden state
        of the token before `last` is missing.
        """
