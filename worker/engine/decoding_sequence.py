"""Holds what a decoding sequence is, and decodes one in its own cache.

Owner: the inference thread.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import TokenBuffer

from hearth.worker.engine.sampler import TokenChoice
from hearth.worker.engine.shared_trunk import Trunk


def _nothing(*_: object) -> None:
    pass


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
    join_bytes: Callable[[], int] = lambda: 0  # that are held more for that
    shift: int = 0  # of positions, by the prompt's images: see ImageEncoder.shift
    lineage: Hashable | None = None  # who may share KV of equal tokens has an equal one; None: none


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


class DecodingRow:
    """One sequence's tokens and how the next is chosen, wherever its KV is.

    Invariant: its KV holds `fed`. `number` orders the rows of a batch.
    """

    def __init__(self, sequence: Sequence, number: int) -> None:
        self.key = sequence.key
        self.number = number
        self.choice = sequence.choice
        self.wants_logprobs = sequence.choice.top_logprobs is not None
        self.shift = sequence.shift
        self.remaining = sequence.tokens_max  # tokens that it may still say
        self.fed = list(sequence.tokens)
        self.context = TokenBuffer(sequence.tokens) if sequence.choice.processors else None
        self.is_lent = False  # its KV is in no slot's own cache
        self.lineage = sequence.lineage
        self.prompt = np.array(sequence.tokens + sequence.tail, dtype=np.int64)
        self.trunk: Trunk | None = None  # that its KV begins with, beside other rows' in a batch
        self._before_join = sequence.before_join
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
        """Its KV is about to be copied out of its slot's cache, for good."""
        if not self.is_lent:
            self.is_lent = True
            self._before_join()

    def process(self, inputs: mx.array, logits: mx.array) -> mx.array:
        """Return the logits (1, vocabulary) behind `inputs` (n,) as its processors leave them."""
        if self.context is None:
            return logits
        context = self.context.update_and_fetch(inputs)
        for process in self.choice.processors:
            logits = process(context, logits)
        return logits


class LoneSequence:
    """One sequence in its own cache, one forward ahead of what was returned.

    `token` (1,) was sampled behind what the cache holds, by `logprobs` (1, vocabulary).
    """

    def __init__(self, model: Any, sequence: Sequence, number: int) -> None:
        self.row = DecodingRow(sequence, number)
        self.cache = sequence.cache
        self._before_forward = sequence.before_forward
        self._prepare(model)
        self._feed(mx.array(sequence.tail, dtype=mx.uint32))
        self.row.fed += sequence.tail

    @classmethod
    def of_batch(
        cls, model: Any, row: DecodingRow, cache: list[Any], token: mx.array, logprobs: mx.array
    ) -> "LoneSequence":
        """Return a sequence that leaves a batch: nothing of it is in a slot."""
        lone = cls.__new__(cls)
        lone.row, lone.cache, lone.token, lone.logprobs = row, cache, token, logprobs
        lone._before_forward = _nothing
        lone._prepare(model)
        return lone

    def _prepare(self, model: Any) -> None:
        self._model = model
        # Models of text alone take no such argument.
        self._model_arguments = {"shift": self.row.shift} if self.row.shift else {}

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.cache)

    def step(self) -> SampledToken:
        """Return the token that was sampled last; the next one is computed meanwhile."""
        row, token, logprobs = self.row, self.token, self.logprobs
        assert row.remaining > 0, "a sequence past its limit is removed, not stepped"
        row.remaining -= 1
        if row.remaining:
            self._feed(token)
        token_id: int = token.item()  # type: ignore[assignment]
        if row.remaining:
            row.fed.append(token_id)
        return SampledToken(row.key, token_id, logprobs[0] if row.wants_logprobs else None)

    def _feed(self, inputs: mx.array) -> None:
        """Feed `inputs` (n,) and have what follows them sampled."""
        self._before_forward(len(self.row.fed) + len(inputs))
        logits = self._model(inputs[None], cache=self.cache, **self._model_arguments)[:, -1, :]
        logits = self.row.process(inputs, logits)
        self.logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self.token = self.row.choice.sampler(self.logprobs)
        mx.async_eval(self.token, self.logprobs)  # type: ignore[no-untyped-call]
