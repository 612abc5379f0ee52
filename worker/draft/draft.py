"""Says what a draft is, what proposes one, and what the engine asks of an answer's drafter.

Tokens alone: nothing here knows a model or an array.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
