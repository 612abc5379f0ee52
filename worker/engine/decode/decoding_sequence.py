"""Holds what a decoding sequence is, wherever its KV is.

Owner: the inference thread.
"""

from collections.abc import Callable, Hashable, Sequence as TypedSequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import TokenBuffer

from hearth.worker.draft.draft import Drafter
from hearth.worker.draft.model_drafts import ModelDrafts
from hearth.worker.engine.decode.sampler import TokenChoice
from hearth.worker.engine.decode.shared_trunk import Trunk
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.lora.lora_adapter import LoraAdapter

# Logits (rows, vocabulary), not computed yet, and the tokens (rows,) that were chosen by them ->
# the tokens that are said. Called once a forward: where one model is over several processes it is
# how they come to the same tokens.
Agree = Callable[[mx.array, mx.array], mx.array]


def as_chosen(_logits: mx.array, tokens: mx.array) -> mx.array:
    """Say what was chosen: nobody else computes this model."""
    return tokens


def _nothing(*_: object) -> None:
    pass


class ForwardUndo(Protocol):
    """Where a live cache stands before a forward of several rows; good until the next one."""

    @property
    def keeps_rows(self) -> bool:
        """Whether any number of the forward's last rows can be cut."""

    def cut(self, rows: int) -> None:
        """Leave out the last `rows` of the forward, not all of it."""

    def pick(self, rows: int, path: TypedSequence[int]) -> None:
        """Leave of the forward's last `rows` only those of `path`, which ascends; not all are gone.

        Where that is not their beginning, every layer keeps plain rows.
        """

    def back(self, rows: int) -> None:
        """Leave out the whole forward, which had `rows`."""


@dataclass(slots=True)
class Sequence:
    """A prefilled request. `cache` holds `tokens`; `tail` is the prompt's rest, not fed yet."""

    key: str
    cache: list[Any]
    tokens: list[int]
    tail: list[int]
    choice: TokenChoice
    tokens_max: int  # of the completion
    before_forward: Callable[[int], None] = _nothing  # called with how many tokens it will hold
    before_join: Callable[[], None] = _nothing  # its cache is about to be copied into a batch
    # It has left a batch, and decodes alone in this cache from here on.
    take_back: Callable[[list[Any]], None] = _nothing
    join_bytes: Callable[[], int] = lambda: 0  # that are held more for that
    shift: int = 0  # of positions, by the prompt's images: see ImageEncoder.shift
    drafter: Drafter | None = None  # None = nothing is drafted
    # Called before a forward that verifies a draft, with how many tokens will be held in any case,
    # and the draft's nodes; returns how many of these may come along.
    before_draft: Callable[[int, int], int] = lambda _rows, _draft_rows: 0
    rewind_point: Callable[[list[Any]], ForwardUndo] | None = None  # None = it cannot go back
    draft_model: ModelDrafts | None = None  # is given the hidden states of its forwards
    hidden: mx.array | None = None  # those of the last of `tokens` (1, n, hidden), if they are kept
    lineage: Hashable | None = None  # who may share KV of equal tokens has an equal one; None: none
    adapter: LoraAdapter | None = None  # that its forwards are computed with


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """What a sequence leaves: `cache` holds exactly `tokens`, evaluated.

    The tokens may be one more than were returned: decoding looks one ahead.
    """

    cache: list[Any]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; `logprobs` (vocabulary,) only where the request asked for them."""

    key: str
    token_id: int
    logprobs: mx.array | None
    is_drafted: bool = False  # it was drafted, and computed in the forward of the one before it


class DecodingRow:
    """One sequence's tokens and how the next is chosen, wherever its KV is.

    Invariant: its KV holds `fed`, but for what a lone sequence's `waiting` says. `number` orders
    the rows of a batch.
    """

    def __init__(
        self, sequence: Sequence, number: int, tree_forward: TreeForward | None = None
    ) -> None:
        self.key = sequence.key
        self.number = number
        self.choice = sequence.choice
        self.wants_logprobs = sequence.choice.top_logprobs is not None
        self.shift = sequence.shift
        self.remaining = sequence.tokens_max  # tokens that it may still say
        self.fed = list(sequence.tokens)
        self.returned = 0  # tokens of the answer
        self.place = 0  # in the answer, of the token that is sampled next
        is_processed = sequence.choice.processors or sequence.choice.guide is not None
        self.context = TokenBuffer(sequence.tokens) if is_processed else None
        self.rewind_point = sequence.rewind_point
        self.drafter = sequence.drafter if sequence.rewind_point is not None else None
        self.draft_model = sequence.draft_model if self.drafter is not None else None
        if self.draft_model is not None and sequence.hidden is not None:
            count = sequence.hidden.shape[1]
            known = mx.array(self.fed[-count:], dtype=mx.uint32)
            self.draft_model.take(len(self.fed) - count, known, sequence.hidden)
        self.tree_forward = tree_forward  # None = drafts have no branches
        self.is_lent = False  # its KV is in no slot's own cache
        self.lineage = sequence.lineage
        self.adapter = sequence.adapter
        self.prompt = np.array(sequence.tokens + sequence.tail, dtype=np.int64)
        self.trunk: Trunk | None = None  # that its KV begins with, beside other rows' in a batch
        self.before_forward = sequence.before_forward
        self.before_draft = sequence.before_draft
        self._before_join = sequence.before_join
        self._take_back = sequence.take_back
        self._join_bytes = sequence.join_bytes

    @property
    def own_length(self) -> int:
        """Tokens of its KV that no other row shares."""
        return len(self.fed) - (self.trunk.length if self.trunk is not None else 0)

    @property
    def join_bytes(self) -> int:
        """What is held more once it has joined a batch, beside the padding."""
        return 0 if self.is_lent else self._join_bytes()

    def lend(self) -> None:
        """Its KV is about to be copied out of its slot's cache."""
        if not self.is_lent:
            self.is_lent = True
            self._before_join()

    def give_back(self, cache: list[Any]) -> None:
        """Its KV is in this cache again, which is its slot's from here on."""
        if self.is_lent:
            self.is_lent = False
            self._take_back(cache)

    def sample(self, inputs: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return the token (1,) behind `inputs` (n,), and the log probabilities (1, vocabulary).

        `logits` (1, vocabulary) are the model's.
        """
        logprobs = normalised(self.process(inputs, logits))
        return self.choice.sampler(logprobs, (self.next_place(),)), logprobs

    def note(self, tokens: TypedSequence[int]) -> None:
        """Count tokens that are returned, and tell the drafter, if there is one."""
        self.returned += len(tokens)
        if self.drafter is not None:
            self.drafter.take(tokens)

    def take(self, tokens: list[int]) -> None:
        """Go on by the tokens of a draft that the model says too, and the one that it says then."""
        self.note(tokens)
        self.fed += tokens
        self.place += len(tokens) + 1
        if self.context is not None:
            self.context.update_and_fetch(mx.array(tokens, dtype=mx.int32))
        if self.choice.guide is not None:
            self.choice.guide.take(tokens)

    def next_place(self) -> int:
        """Return the place of the token that is sampled now; the next one's comes behind it."""
        self.place += 1
        return self.place - 1

    def process(self, inputs: mx.array, logits: mx.array) -> mx.array:
        """Return the logits (1, vocabulary) behind `inputs` (n,) as its processors leave them."""
        if self.context is None:
            return logits
        context = self.context.update_and_fetch(inputs)
        for process in self.choice.processors:
            logits = process(context, logits)
        guide = self.choice.guide
        return logits if guide is None else guide.process(context, logits)


def normalised(logits: mx.array) -> mx.array:
    """Return log probabilities (rows, vocabulary)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
