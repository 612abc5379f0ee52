"""Decodes one sequence in its own cache, token by token or by drafts that one forward verifies.

`DecodingSequence` is used in a batch too: there the batch holds the KV and makes the forwards.

A draft is verified as if its tokens came one by one. Row 0 of the logits follows the last known
token, row n + 1 follows the draft's node n. The processors of each row get the tokens on its path,
and its token is drawn with the random key of its position in the answer. So for the same logits the
accepted tokens are those that the model would have written without a draft.
Owner: the inference thread.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import TokenBuffer
from numpy.typing import NDArray

from hearth.worker.draft.draft import Draft, Drafter, ModelDrafts
from hearth.worker.engine.decode.draft_model import with_hidden
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.decode.shared_trunk import Trunk
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.lora.lora_adapter import LoraAdapter, applied

ROWS_MAX: Final = 8  # tokens of a verifying forward; MLX's kernels for few rows take no more

# (lazy logits (rows, vocabulary), tokens (rows,) sampled from these logits) -> the tokens to use.
# Called once per forward, so that processes that compute one model together use the same tokens.
Agree = Callable[[mx.array, mx.array], mx.array]


def as_chosen(_logits: mx.array, tokens: mx.array) -> mx.array:
    """Return the sampled tokens: no other process computes this model."""
    return tokens


def _nothing(*_: object) -> None:
    pass


class ForwardUndo(Protocol):
    """The state of a live cache before a forward of several tokens. Valid until the next forward.

    A row is the KV row of a token of that forward.
    """

    @property
    def keeps_rows(self) -> bool:
        """Whether any number of the forward's last rows can be removed from the cache."""

    def cut(self, rows: int) -> None:
        """Remove the forward's last `rows`, fewer than it has."""

    def pick(self, rows: int, path: Sequence[int]) -> None:
        """Keep only the rows in `path`: ascending indices into the forward's last `rows`.

        The forward has earlier rows too. Unless `path` is 0, 1, 2, ..., every layer must keep
        plain rows.
        """

    def back(self, rows: int) -> None:
        """Remove the whole forward, which had `rows`."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. `logprobs` (vocabulary,) are set only if the request wants them."""

    request_id: str
    token_id: int
    logprobs: mx.array | None
    is_drafted: bool = False  # True: from a draft, and one forward verified several tokens


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """A prefilled request and the state of its answer, alone or in a batch.

    Invariant: its KV holds `tokens`, except those in `SingleSequence.unfed`. Outside a batch the KV
    is in `cache`. `tail` is the rest of the prompt, which is not fed before `begin`. When a
    sequence is removed, `cache` holds exactly `tokens`, evaluated. Perhaps the last token is not
    returned yet, as decoding is one token ahead.
    """

    request_id: str
    cache: list[Any]
    tokens: list[int]
    tail: list[int]
    sampling: SamplingParams
    tokens_max: int  # limit of the completion
    before_forward: Callable[[int], None] = _nothing  # gets the count of tokens held afterwards
    before_join: Callable[[], None] = _nothing  # called before `cache` is copied into a batch
    # Called with the sequence's own cache when it has left a batch.
    take_back: Callable[[list[Any]], None] = _nothing
    join_bytes: Callable[[], int] = lambda: 0  # memory for joining a batch, without the KV
    shift: int = 0  # offset of the positions, from the prompt's images: see ImageEncoder.shift
    drafter: Drafter | None = None  # None = no drafts
    # Called before a forward that verifies a draft, with the number of tokens held without the
    # draft, and the draft's nodes. Returns how many nodes fit.
    before_draft: Callable[[int, int], int] = lambda _rows, _draft_rows: 0
    rewind_point: Callable[[list[Any]], ForwardUndo] | None = None  # None = no way back
    draft_model: ModelDrafts | None = None  # takes the hidden states of each forward
    hidden: mx.array | None = None  # hidden states of the last `tokens` (1, n, hidden), if kept
    lineage: Hashable | None = None  # equal for sequences that may share KV; None = shares nothing
    adapter: LoraAdapter | None = None  # applied in its forwards

    number: int = field(init=False)  # orders the sequences of a batch
    prompt: NDArray[np.int64] = field(init=False)
    context: TokenBuffer | None = field(init=False)  # all tokens, for processors; None = unused
    remaining: int = field(init=False)  # tokens that the answer may still have
    returned: int = field(init=False, default=0)  # tokens of the answer
    position: int = field(init=False, default=0)  # position in the answer of the token sampled next
    is_lent: bool = field(init=False, default=False)  # True: its KV is in a batch, in no slot
    trunk: Trunk | None = field(init=False, default=None)  # shared prefix in a batch

    def begin(self, number: int) -> None:
        """Prepare the first step: set the counters, and give the draft model its hidden states."""
        self.number = number
        self.remaining = self.tokens_max
        self.prompt = np.array(self.tokens + self.tail, dtype=np.int64)
        is_processed = self.sampling.processors or self.sampling.guide is not None
        self.context = TokenBuffer(self.tokens) if is_processed else None
        if self.rewind_point is None:
            self.drafter = None
        if self.drafter is None:
            self.draft_model = None
        hidden, self.hidden = self.hidden, None
        if self.draft_model is not None and hidden is not None:
            count = hidden.shape[1]
            known = mx.array(self.tokens[-count:], dtype=mx.uint32)
            self.draft_model.take(len(self.tokens) - count, known, hidden)

    @property
    def own_length(self) -> int:
        """The number of tokens after the trunk."""
        return len(self.tokens) - (self.trunk.length if self.trunk is not None else 0)

    def lend(self) -> None:
        """Mark the KV as being in a batch. Called before it leaves the slot's cache."""
        if not self.is_lent:
            self.is_lent = True
            self.before_join()

    def give_back(self) -> None:
        """Give `cache`, with the KV, back to the slot."""
        if self.is_lent:
            self.is_lent = False
            self.take_back(self.cache)

    def sampled(
        self, token_id: int, logprobs: mx.array, row: int = 0, *, is_drafted: bool = False
    ) -> SampledToken:
        """Return the report of a token that was drawn from row `row` of `logprobs`."""
        wanted = logprobs[row] if self.sampling.top_logprobs is not None else None
        return SampledToken(self.request_id, token_id, wanted, is_drafted)

    def record(self, tokens: Sequence[int]) -> None:
        """Count returned tokens, and give them to the drafter."""
        self.returned += len(tokens)
        if self.drafter is not None:
            self.drafter.take(tokens)

    def accept(self, tokens: list[int]) -> None:
        """Append a draft's accepted tokens. The token sampled after these is counted too."""
        self.record(tokens)
        self.tokens += tokens
        self.position += len(tokens) + 1
        if self.context is not None:
            self.context.update_and_fetch(mx.array(tokens, dtype=mx.int32))
        if self.sampling.guide is not None:
            self.sampling.guide.take(tokens)

    def next_position(self) -> int:
        """Return the position in the answer of the token that is sampled now, and count it."""
        self.position += 1
        return self.position - 1

    def process(self, inputs: mx.array, logits: mx.array) -> mx.array:
        """Apply the processors to the logits (1, vocabulary) that follow `inputs` (n,)."""
        if self.context is None:
            return logits
        context = self.context.update_and_fetch(inputs)
        for process in self.sampling.processors:
            logits = process(context, logits)
        guide = self.sampling.guide
        return logits if guide is None else guide.process(context, logits)

    def process_draft(self, token_id: int, draft: Draft, logits: mx.array) -> mx.array:
        """Apply the processors to the logits (nodes + 1, vocabulary) of a draft.

        `token_id` is the last known token. It is appended to the context.
        """
        if self.context is None:
            return logits
        context = self.context.update_and_fetch(mx.array([token_id], dtype=mx.int32))
        if self.sampling.processors:
            processed = []
            for row, path in enumerate(_paths(draft)):
                known = mx.concatenate([context, mx.array(path, mx.int32)]) if path else context
                row_logits = logits[row : row + 1]
                for process in self.sampling.processors:
                    row_logits = process(known, row_logits)
                processed.append(row_logits)
            logits = mx.concatenate(processed)
        guide = self.sampling.guide
        assert guide is None or draft.is_chain, "a guide follows one path"
        return logits if guide is None else guide.process_rows(draft.tokens, logits)


def normalised(logits: mx.array) -> mx.array:
    """Return log probabilities (rows, vocabulary)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class SingleSequence:
    """Decodes one sequence in its own cache, one forward ahead of the tokens that were returned.

    `token` (1,) is the next token, not returned yet, drawn from `logprobs` (1, vocabulary).
    Invariant: the cache holds `sequence.tokens` without the last ones, `unfed`. Unfed tokens were
    accepted from a draft, and the cache was then set back to before the draft, as a layer with a
    recurrent state cannot be cut. They are fed again with the next token.
    """

    def __init__(
        self,
        model: Any,
        sequence: DecodingSequence,
        tree_forward: TreeForward | None = None,
        agree: Agree = as_chosen,
        sampled: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        """Take over a sequence that leaves a batch, or feed the tail of a new one's prompt.

        `sampled` are the `token` and the `logprobs` of a sequence that leaves a batch. Its KV is in
        no slot before `give_back`. Without `tree_forward` drafts have no branches.
        """
        self.sequence = sequence
        self.unfed: list[int] = []
        self._model = model
        self._tree_forward = tree_forward
        self._agree = agree
        # If the last forward verified a draft: the way back, and the forward's tokens in the cache.
        self._undo: tuple[ForwardUndo, list[int]] | None = None
        # The last forward's tokens (n,) and hidden states (1, n, hidden), for a draft model.
        self._hidden: tuple[mx.array, mx.array] | None = None
        # Text-only models take no `shift`.
        self._model_arguments = {"shift": sequence.shift} if sequence.shift else {}
        if sampled is not None:
            self.token, self.logprobs = sampled
        else:
            sequence.tokens += sequence.tail
            self._feed(mx.array(sequence.tail, dtype=mx.uint32), len(sequence.tokens))

    def step(self, may_draft: bool = False) -> list[SampledToken]:
        """Return the token that was sampled last, and the accepted tokens of a draft.

        Without a draft the next token is computed meanwhile.
        """
        sequence, drafter = self.sequence, self.sequence.drafter
        assert sequence.remaining > 0, "a sequence at its limit was not removed"
        # A draft has to wait for the token that is computed now. A guide waits for it anyway.
        may_draft = may_draft and self._draft_tokens_max() >= 1
        is_guided = sequence.sampling.guide is not None
        if may_draft and drafter is not None and (is_guided or drafter.is_promising()):
            return self._step_by_draft(drafter)
        token, logprobs = self.token, self.logprobs
        sequence.remaining -= 1
        if sequence.remaining:
            self._feed(token, len(sequence.tokens) + 1)
        token_id: int = token.item()  # type: ignore[assignment]
        if sequence.remaining:
            sequence.tokens.append(token_id)
        sequence.record([token_id])
        return [sequence.sampled(token_id, logprobs)]

    def sync_cache(self, surplus: int = 0) -> None:
        """Drop the last `surplus` returned tokens, and make the cache hold exactly the others."""
        if surplus:
            del self.sequence.tokens[-surplus:]
            if self.unfed:
                del self.unfed[-surplus:]
            else:
                assert self._undo is not None, "surplus tokens without a verified draft"
                (point, fed), self._undo = self._undo, None
                if point.keeps_rows:
                    point.cut(surplus)
                else:
                    point.back(len(fed))
                    self.unfed = fed[:-surplus]
        if self.unfed:
            inputs, self.unfed = self.unfed, []
            self.sequence.before_forward(len(self.sequence.tokens))
            self._forward(inputs)

    # ------------------------------------------------------------ token by token

    def _feed(self, inputs: mx.array, count: int) -> None:
        """Feed the last returned tokens (n,) and sample. The cache then holds `count` tokens."""
        sequence = self.sequence
        sequence.before_forward(count)
        unfed, self.unfed = self.unfed, []
        logits = self._forward([*unfed, inputs])[:, -1, :]
        self._feed_draft_model(count - len(unfed) - inputs.shape[0])
        self.logprobs = normalised(sequence.process(inputs, logits))
        chosen = sequence.sampling.sampler(self.logprobs, (sequence.next_position(),))
        self.token = self._agree(logits, chosen)
        mx.async_eval(self.token, self.logprobs)  # type: ignore[no-untyped-call]

    def _forward(self, inputs: Sequence[int | mx.array]) -> mx.array:
        """Feed tokens, some of them still lazy arrays; return logits (1, n, vocabulary)."""
        self._undo = None
        sequence = self.sequence
        parts = [mx.array([t], mx.uint32) if isinstance(t, int) else t for t in inputs]
        fed = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        with applied(sequence.adapter):
            if sequence.draft_model is None:
                logits: mx.array = self._model(
                    fed[None], cache=sequence.cache, **self._model_arguments
                )
                return logits
            logits, hidden = with_hidden(
                self._model, fed[None], sequence.cache, **self._model_arguments
            )
        self._hidden = (fed, hidden)
        return logits

    def _feed_draft_model(self, start: int, count: int | None = None) -> None:
        """Give the draft model the first `count` hidden states of the last forward, or all.

        `start` is the position of the forward's first token in the sequence.
        """
        if self._hidden is not None:
            (tokens, hidden), self._hidden = self._hidden, None
            assert self.sequence.draft_model is not None
            self.sequence.draft_model.take(start, tokens[:count], hidden[:, :count])

    # ------------------------------------------------------------ by drafts

    def _draft_tokens_max(self) -> int:
        """Return how many nodes a draft may have. The answer's last token is never fed."""
        return min(self.sequence.remaining - 2, ROWS_MAX - len(self.unfed) - 1)

    def _step_by_draft(self, drafter: Drafter) -> list[SampledToken]:
        """Return the token that was sampled last, and the accepted tokens of a draft after it.

        The draft may be empty.
        """
        sequence, token, logprobs = self.sequence, self.token, self.logprobs
        token_id: int = token.item()  # type: ignore[assignment]
        sequence.record([token_id])
        if sequence.sampling.guide is not None:
            sequence.sampling.guide.take([token_id])
        draft = self._draft(drafter)
        sampled = [sequence.sampled(token_id, logprobs)]
        sequence.tokens.append(token_id)
        if draft:
            sampled += self._verify(token_id, draft, drafter)
        else:
            self._feed(token, len(sequence.tokens))
        sequence.remaining -= len(sampled)
        return sampled

    def _draft(self, drafter: Drafter) -> Draft:
        """Return a draft after the known tokens, of a length that guide and memory allow."""
        sequence = self.sequence
        if sequence.draft_model is not None:
            sequence.draft_model.look_at(sequence.cache)
        draft = drafter.propose(self._draft_tokens_max(), len(self.unfed) + 1)
        if sequence.draft_model is not None:
            sequence.draft_model.look_at(None)
        if draft and sequence.sampling.guide is not None:
            assert draft.is_chain, "a guide follows one path"
            draft = draft.cut(sequence.sampling.guide.fitting(draft.tokens))
        if draft:
            draft = draft.cut(sequence.before_draft(len(sequence.tokens) + 1, len(draft)))
        return draft

    def _verify(self, token_id: int, draft: Draft, drafter: Drafter) -> list[SampledToken]:
        """Feed the last returned token and a draft; return the accepted tokens.

        The next token is sampled too, and kept as `token`.
        """
        sequence = self.sequence
        assert sequence.rewind_point is not None
        known = [*self.unfed, token_id]
        point = sequence.rewind_point(sequence.cache)
        logits = self._forward_draft(known, draft)[0, len(self.unfed) :]
        logprobs = normalised(sequence.process_draft(token_id, draft, logits))
        chosen = sequence.sampling.sampler(logprobs, _row_positions(sequence.position, draft))
        ids: list[int] = chosen.tolist()  # type: ignore[assignment]
        path = _accepted_path(draft, ids)
        tokens = [draft.tokens[node] for node in path]
        drafter.record(draft, path, len(known) + len(draft))
        self._feed_draft_model(len(sequence.tokens) - len(known), len(known) + len(path))
        self._keep(point, known, draft, path)
        sequence.accept(tokens)
        last = path[-1] + 1 if path else 0
        self.token, self.logprobs = chosen[last : last + 1], logprobs[last : last + 1]
        rows = [0, *(node + 1 for node in path)]  # rows of `logprobs` that gave the path's tokens
        return [
            sequence.sampled(token, logprobs, row, is_drafted=True)
            for token, row in zip(tokens, rows, strict=False)
        ]

    def _forward_draft(self, known: list[int], draft: Draft) -> mx.array:
        """Feed known tokens and a draft after them; return logits (1, n, vocabulary)."""
        if draft.is_chain:
            return self._forward([*known, *draft.tokens])
        self._undo = None
        run = self._tree_forward
        assert run is not None, "this model's drafts have no branches"
        with applied(self.sequence.adapter):
            return run(known, draft.tokens, draft.parents, self.sequence.cache, self.sequence.shift)

    def _keep(self, point: ForwardUndo, known: list[int], draft: Draft, path: list[int]) -> None:
        """Remove the rejected nodes' KV: the cache keeps `known` tokens and the draft's `path`.

        Where the cache can only drop the whole forward, the kept tokens become `unfed`.
        """
        kept = [*known, *(draft.tokens[node] for node in path)]
        self.unfed, self._undo = [], (point, kept)
        if len(path) == len(draft):
            return
        if point.keeps_rows:
            point.pick(len(draft), path)
        else:
            assert draft.is_chain, "a draft with branches needs plain KV rows"
            point.back(len(known) + len(draft))
            self.unfed, self._undo = kept, None


def _accepted_path(draft: Draft, chosen: Sequence[int]) -> list[int]:
    """Return the accepted nodes: the path from the root on which each node was `chosen`."""
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True))
    }
    path: list[int] = []
    node: int | None = children.get((-1, chosen[0]))
    while node is not None:
        path.append(node)
        node = children.get((node, chosen[node + 1]))
    return path


def _row_positions(first: int, draft: Draft) -> list[int]:
    """Return, for each row of logits, the position in the answer of the token drawn from it."""
    positions = [first]
    for parent in draft.parents:
        positions.append(positions[parent + 1] + 1)
    return positions


def _paths(draft: Draft) -> list[list[int]]:
    """Return, for each row of logits, the draft's tokens before it."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths
