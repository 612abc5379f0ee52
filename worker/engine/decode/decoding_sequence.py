"""Decodes one sequence in its own cache, token by token or by drafts that one forward verifies.

A sequence is the same in a batch: its KV is elsewhere then, and the batch makes its forwards.

A draft is verified as if its tokens came one by one. Row 0 of the forward is behind the last known
token, row n + 1 behind the draft's node n. Each row is processed as if the tokens on its path had
been said, and drawn with the key of its place in the answer: so what is accepted is what the model
would have said without a draft, for the same logits.
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

ROWS_MAX: Final = 8  # of a forward that verifies; MLX's kernels for few rows take no more

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

    def pick(self, rows: int, path: Sequence[int]) -> None:
        """Leave of the forward's last `rows` only those of `path`, which ascends; not all are gone.

        Where that is not their beginning, every layer keeps plain rows.
        """

    def back(self, rows: int) -> None:
        """Leave out the whole forward, which had `rows`."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; `logprobs` (vocabulary,) only where the request asked for them."""

    request_id: str
    token_id: int
    logprobs: mx.array | None
    is_drafted: bool = False  # it was drafted, and computed in the forward of the one before it


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """A prefilled request, and how far its answer has come, wherever its KV is.

    Invariant: its KV holds `tokens`, but for what a lone sequence's `waiting` says. `tail` is the
    prompt's rest, which `begin` finds not fed yet. Alone its KV is in `cache`. One that is removed
    leaves exactly `tokens` in it, evaluated: they may be one more than were returned, as decoding
    looks one ahead.
    """

    request_id: str
    cache: list[Any]
    tokens: list[int]
    tail: list[int]
    choice: SamplingParams
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

    number: int = field(init=False)  # orders the rows of a batch
    prompt: NDArray[np.int64] = field(init=False)
    context: TokenBuffer | None = field(init=False)  # of all tokens; None = nobody asks for them
    remaining: int = field(init=False)  # tokens that it may still say
    returned: int = field(init=False, default=0)  # tokens of the answer
    place: int = field(init=False, default=0)  # in the answer, of the token that is sampled next
    is_lent: bool = field(init=False, default=False)  # its KV is in no slot's own cache
    trunk: Trunk | None = field(init=False, default=None)  # its KV begins with, beside other rows'

    def begin(self, number: int) -> None:
        """Make ready to decode: what was found out by prefilling goes where it is needed."""
        self.number = number
        self.remaining = self.tokens_max
        self.prompt = np.array(self.tokens + self.tail, dtype=np.int64)
        is_processed = self.choice.processors or self.choice.guide is not None
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
        """Tokens of its KV that no other row shares."""
        return len(self.tokens) - (self.trunk.length if self.trunk is not None else 0)

    def lend(self) -> None:
        """Its KV is about to be copied out of its slot's cache."""
        if not self.is_lent:
            self.is_lent = True
            self.before_join()

    def give_back(self) -> None:
        """Its KV is in `cache` again, which is its slot's from here on."""
        if self.is_lent:
            self.is_lent = False
            self.take_back(self.cache)

    def sampled(
        self, token_id: int, logprobs: mx.array, at: int = 0, *, is_drafted: bool = False
    ) -> SampledToken:
        """Return a token as it is told, which was drawn by the row `at` of `logprobs`."""
        wanted = logprobs[at] if self.choice.top_logprobs is not None else None
        return SampledToken(self.request_id, token_id, wanted, is_drafted)

    def note(self, tokens: Sequence[int]) -> None:
        """Count tokens that are returned, and tell the drafter, if there is one."""
        self.returned += len(tokens)
        if self.drafter is not None:
            self.drafter.take(tokens)

    def take(self, tokens: list[int]) -> None:
        """Go on by the tokens of a draft that the model says too, and the one that it says then."""
        self.note(tokens)
        self.tokens += tokens
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

    def process_draft(self, token_id: int, draft: Draft, logits: mx.array) -> mx.array:
        """Return logits (nodes + 1, vocabulary) as its processors leave them.

        `token_id` is the last known token, which the context then holds.
        """
        if self.context is None:
            return logits
        context = self.context.update_and_fetch(mx.array([token_id], dtype=mx.int32))
        if self.choice.processors:
            processed = []
            for number, path in enumerate(_paths(draft)):
                known = mx.concatenate([context, mx.array(path, mx.int32)]) if path else context
                one = logits[number : number + 1]
                for process in self.choice.processors:
                    one = process(known, one)
                processed.append(one)
            logits = mx.concatenate(processed)
        guide = self.choice.guide
        assert guide is None or draft.is_chain, "a guide follows one path"
        return logits if guide is None else guide.process_rows(draft.tokens, logits)


def normalised(logits: mx.array) -> mx.array:
    """Return log probabilities (rows, vocabulary)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class SingleSequence:
    """One sequence in its own cache, one forward ahead of what was returned.

    `token` (1,) was sampled behind all that was returned, by `logprobs` (1, vocabulary).
    Invariant: the cache holds `row.tokens` but for the last of them, `waiting`: what was accepted
    of drafts that a layer with a state could not be cut back to. It is fed again with what follows.
    """

    def __init__(
        self,
        model: Any,
        row: DecodingSequence,
        tree_forward: TreeForward | None = None,
        agree: Agree = as_chosen,
        sampled: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        """`sampled` are `token` and `logprobs` of a sequence that leaves a batch; nothing of it is
        in a slot, see `give_back`. Without them the prompt's tail is fed. A model without
        `tree_forward` has drafts without branches.
        """
        self.row = row
        self.waiting: list[int] = []
        self._model = model
        self._tree_forward = tree_forward
        self._agree = agree
        # Takes back the last forward, where it has verified: of that the cache holds these tokens.
        self._undo: tuple[ForwardUndo, list[int]] | None = None
        # The last forward's tokens (n,) and hidden states (1, n, hidden), for a draft model.
        self._hidden: tuple[mx.array, mx.array] | None = None
        # Models of text alone take no such argument.
        self._model_arguments = {"shift": row.shift} if row.shift else {}
        if sampled is not None:
            self.token, self.logprobs = sampled
        else:
            row.tokens += row.tail
            self._feed(mx.array(row.tail, dtype=mx.uint32), len(row.tokens))

    def step(self, may_draft: bool = False) -> list[SampledToken]:
        """Return the token that was sampled last, and what a forward behind it has verified.

        Without a draft the next token is computed meanwhile.
        """
        row, drafter = self.row, self.row.drafter
        assert row.remaining > 0, "a sequence past its limit is removed, not stepped"
        # A draft waits for the token that is computed now, and a guide does so in any case.
        may_draft = may_draft and self._draft_tokens_max() >= 1
        is_guided = row.choice.guide is not None
        if may_draft and drafter is not None and (is_guided or drafter.is_promising()):
            return self._step_by_draft(drafter)
        token, logprobs = self.token, self.logprobs
        row.remaining -= 1
        if row.remaining:
            self._feed(token, len(row.tokens) + 1)
        token_id: int = token.item()  # type: ignore[assignment]
        if row.remaining:
            row.tokens.append(token_id)
        row.note([token_id])
        return [row.sampled(token_id, logprobs)]

    def settle(self, surplus: int = 0) -> None:
        """Forget the last `surplus` tokens that were returned, and have the cache hold the rest."""
        if surplus:
            del self.row.tokens[-surplus:]
            if self.waiting:
                del self.waiting[-surplus:]
            else:
                assert self._undo is not None, (
                    "only a verified draft returns tokens that are too many"
                )
                (point, fed), self._undo = self._undo, None
                if point.keeps_rows:
                    point.cut(surplus)
                else:
                    point.back(len(fed))
                    self.waiting = fed[:-surplus]
        if self.waiting:
            inputs, self.waiting = self.waiting, []
            self.row.before_forward(len(self.row.tokens))
            self._forward(inputs)

    # ------------------------------------------------------------ token by token

    def _feed(self, inputs: mx.array, count: int) -> None:
        """Feed the last returned tokens (n,), behind which the cache holds `count`; sample."""
        row = self.row
        row.before_forward(count)
        waiting, self.waiting = self.waiting, []
        logits = self._forward([*waiting, inputs])[:, -1, :]
        self._tell_draft_model(count - len(waiting) - inputs.shape[0])
        self.logprobs = normalised(row.process(inputs, logits))
        chosen = row.choice.sampler(self.logprobs, (row.next_place(),))
        self.token = self._agree(logits, chosen)
        mx.async_eval(self.token, self.logprobs)  # type: ignore[no-untyped-call]

    def _forward(self, inputs: Sequence[int | mx.array]) -> mx.array:
        """Feed tokens, of which some may not be known yet; return logits (1, n, vocabulary)."""
        self._undo = None
        row = self.row
        parts = [mx.array([t], mx.uint32) if isinstance(t, int) else t for t in inputs]
        fed = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        with applied(row.adapter):
            if row.draft_model is None:
                logits: mx.array = self._model(fed[None], cache=row.cache, **self._model_arguments)
                return logits
            logits, hidden = with_hidden(self._model, fed[None], row.cache, **self._model_arguments)
        self._hidden = (fed, hidden)
        return logits

    def _tell_draft_model(self, start: int, count: int | None = None) -> None:
        """Let the draft model have the first `count` rows of the last forward, by default all.

        The first of them is the sequence's token number `start`.
        """
        if self._hidden is not None:
            (tokens, hidden), self._hidden = self._hidden, None
            assert self.row.draft_model is not None
            self.row.draft_model.take(start, tokens[:count], hidden[:, :count])

    # ------------------------------------------------------------ by drafts

    def _draft_tokens_max(self) -> int:
        """Return how many nodes a draft may have: the answer's last token is never fed.

        Without drafts it is not, either.
        """
        return min(self.row.remaining - 2, ROWS_MAX - len(self.waiting) - 1)

    def _step_by_draft(self, drafter: Drafter) -> list[SampledToken]:
        """Return the token that was sampled last, and those of a draft behind it that it verifies.

        The draft may be empty.
        """
        row, token, logprobs = self.row, self.token, self.logprobs
        token_id: int = token.item()  # type: ignore[assignment]
        row.note([token_id])
        if row.choice.guide is not None:
            row.choice.guide.take([token_id])
        draft = self._draft(drafter)
        sampled = [row.sampled(token_id, logprobs)]
        row.tokens.append(token_id)
        if draft:
            sampled += self._verify(token_id, draft, drafter)
        else:
            self._feed(token, len(row.tokens))
        row.remaining -= len(sampled)
        return sampled

    def _draft(self, drafter: Drafter) -> Draft:
        """Return a draft behind the tokens that are known, no longer than there is room for."""
        row = self.row
        if row.draft_model is not None:
            row.draft_model.look_at(row.cache)
        draft = drafter.propose(self._draft_tokens_max(), len(self.waiting) + 1)
        if row.draft_model is not None:
            row.draft_model.look_at(None)
        if draft and row.choice.guide is not None:
            assert draft.is_chain, "a guide follows one path"
            draft = draft.cut(row.choice.guide.fitting(draft.tokens))
        if draft:
            draft = draft.cut(row.before_draft(len(row.tokens) + 1, len(draft)))
        return draft

    def _verify(self, token_id: int, draft: Draft, drafter: Drafter) -> list[SampledToken]:
        """Feed the last returned token and a draft; return the tokens that the model says too.

        What it says behind them is sampled then.
        """
        row = self.row
        assert row.rewind_point is not None
        known = [*self.waiting, token_id]
        point = row.rewind_point(row.cache)
        logits = self._forward_draft(known, draft)[0, len(self.waiting) :]
        logprobs = normalised(row.process_draft(token_id, draft, logits))
        chosen = row.choice.sampler(logprobs, _row_places(row.place, draft))
        ids: list[int] = chosen.tolist()  # type: ignore[assignment]
        path = _accepted_path(draft, ids)
        tokens = [draft.tokens[node] for node in path]
        drafter.note(draft, path, len(known) + len(draft))
        self._tell_draft_model(len(row.tokens) - len(known), len(known) + len(path))
        self._keep(point, known, draft, path)
        row.take(tokens)
        last = path[-1] + 1 if path else 0
        self.token, self.logprobs = chosen[last : last + 1], logprobs[last : last + 1]
        behind = [0, *(node + 1 for node in path)]  # rows that the path's tokens were drawn in
        return [
            row.sampled(token, logprobs, at, is_drafted=True)
            for token, at in zip(tokens, behind, strict=False)
        ]

    def _forward_draft(self, known: list[int], draft: Draft) -> mx.array:
        """Feed known tokens and a draft behind them; return logits (1, n, vocabulary)."""
        if draft.is_chain:
            return self._forward([*known, *draft.tokens])
        self._undo = None
        run = self._tree_forward
        assert run is not None, "this model's drafts have no branches"
        with applied(self.row.adapter):
            return run(known, draft.tokens, draft.parents, self.row.cache, self.row.shift)

    def _keep(self, point: ForwardUndo, known: list[int], draft: Draft, path: list[int]) -> None:
        """Have the cache hold no more of a forward than `known` tokens and the draft's `path`.

        Or have them wait, where it cannot leave out the rest alone.
        """
        kept = [*known, *(draft.tokens[node] for node in path)]
        self.waiting, self._undo = [], (point, kept)
        if len(path) == len(draft):
            return
        if point.keeps_rows:
            point.pick(len(draft), path)
        else:
            assert draft.is_chain, "branches are of layers that keep rows"
            point.back(len(known) + len(draft))
            self.waiting, self._undo = kept, None


def _accepted_path(draft: Draft, chosen: Sequence[int]) -> list[int]:
    """Return the nodes, from the first on, that are what the rows have `chosen`."""
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


def _row_places(place: int, draft: Draft) -> list[int]:
    """Return the places in the answer of the tokens that the rows choose, the first `place`."""
    places = [place]
    for parent in draft.parents:
        places.append(places[parent + 1] + 1)
    return places


def _paths(draft: Draft) -> list[list[int]]:
    """Return for each row the draft's tokens that it is behind."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return paths
