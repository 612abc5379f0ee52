"""Decodes one sequence in its own cache, token by token or by drafts that one forward verifies.

Owner: the inference thread.
"""

from collections.abc import Sequence as TypedSequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from hearth.worker.draft.draft import Draft
from hearth.worker.engine.decode.decoding_sequence import (
    Agree,
    DecodingRow,
    ForwardUndo,
    SampledToken,
    Sequence,
    as_chosen,
    normalised,
)
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.decode.verify import accepted_path, process_rows, row_places
from hearth.worker.engine.hidden_states import with_hidden
from hearth.worker.engine.lora.lora_adapter import applied

ROWS_MAX: Final = 8  # of a forward that verifies; MLX's kernels for few rows take no more


class LoneSequence:
    """One sequence in its own cache, one forward ahead of what was returned.

    `token` (1,) was sampled behind all that was returned, by `logprobs` (1, vocabulary).
    Invariant: the cache holds `row.fed` but for its last tokens, `waiting`: what was accepted of
    drafts that a layer with a state could not be cut back to, and is fed again with what follows.
    """

    def __init__(
        self,
        model: Any,
        sequence: Sequence,
        number: int,
        tree_forward: TreeForward | None = None,
        agree: Agree = as_chosen,
    ) -> None:
        self.row = DecodingRow(sequence, number, tree_forward)
        self.cache = sequence.cache
        self._prepare(model, agree)
        self.waiting: list[int] = []
        self.row.fed += sequence.tail
        self._feed(mx.array(sequence.tail, dtype=mx.uint32), len(self.row.fed))

    @classmethod
    def of_batch(
        cls,
        model: Any,
        row: DecodingRow,
        cache: list[Any],
        sampled: tuple[mx.array, mx.array],
        agree: Agree = as_chosen,
    ) -> "LoneSequence":
        """Return a sequence that leaves a batch: nothing of it is in a slot, see `give_back`.

        `sampled` are its next token (1,) and the log probabilities (1, vocabulary).
        """
        lone = cls.__new__(cls)
        lone.row, lone.cache = row, cache
        lone.token, lone.logprobs = sampled
        lone.waiting = []
        lone._prepare(model, agree)
        return lone

    def _prepare(self, model: Any, agree: Agree) -> None:
        self._model = model
        self._agree = agree
        self._undo: _Undo | None = None  # takes back the last forward, where it has verified
        # The last forward's tokens (n,) and hidden states (1, n, hidden), for a draft model.
        self._hidden: tuple[mx.array, mx.array] | None = None
        # Models of text alone take no such argument.
        self._model_arguments = {"shift": self.row.shift} if self.row.shift else {}

    def step(self, may_draft: bool = False) -> list[SampledToken]:
        """Return the token that was sampled last, and what a forward behind it has verified.

        Without a draft the next token is computed meanwhile.
        """
        row = self.row
        assert row.remaining > 0, "a sequence past its limit is removed, not stepped"
        if may_draft and self._may_draft():
            return self._step_by_draft()
        token, logprobs = self.token, self.logprobs
        row.remaining -= 1
        if row.remaining:
            self._feed(token, len(row.fed) + 1)
        token_id: int = token.item()  # type: ignore[assignment]
        if row.remaining:
            row.fed.append(token_id)
        row.note([token_id])
        return [self._sampled(token_id, logprobs)]

    def settle(self, surplus: int = 0) -> None:
        """Forget the last `surplus` tokens that were returned, and have the cache hold the rest."""
        if surplus:
            self._take_back(surplus)
        if self.waiting:
            inputs, self.waiting = self.waiting, []
            self.row.before_forward(len(self.row.fed))
            self._forward(inputs)

    # ------------------------------------------------------------ token by token

    def _sampled(
        self, token_id: int, logprobs: mx.array, *, is_drafted: bool = False
    ) -> SampledToken:
        """Return a token as it is told; `logprobs` (1, vocabulary) are those it was drawn by."""
        row = self.row
        wanted = logprobs[0] if row.wants_logprobs else None
        return SampledToken(row.key, token_id, wanted, is_drafted)

    def _feed(self, inputs: mx.array, count: int) -> None:
        """Feed the last returned tokens (n,), behind which the cache holds `count`; sample."""
        self.row.before_forward(count)
        waiting, self.waiting = self.waiting, []
        logits = self._forward([*waiting, inputs])[:, -1, :]
        self._tell_draft_model(count - len(waiting) - inputs.shape[0])
        chosen, self.logprobs = self.row.sample(inputs, logits)
        self.token = self._agree(logits, chosen)
        mx.async_eval(self.token, self.logprobs)  # type: ignore[no-untyped-call]

    def _forward(self, inputs: TypedSequence[int | mx.array]) -> mx.array:
        """Feed tokens, of which some may not be known yet; return logits (1, n, vocabulary)."""
        self._undo = None
        parts = [mx.array([t], mx.uint32) if isinstance(t, int) else t for t in inputs]
        fed = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        with applied(self.row.adapter):
            if self.row.draft_model is None:
                logits: mx.array = self._model(fed[None], cache=self.cache, **self._model_arguments)
                return logits
            logits, hidden = with_hidden(
                self._model, fed[None], self.cache, **self._model_arguments
            )
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

    def _may_draft(self) -> bool:
        """Whether it is worth waiting for the token that is computed now, to draft behind it.

        A guide waits for it in any case.
        """
        drafter = self.row.drafter
        if drafter is None or self._draft_tokens_max() < 1:
            return False
        return self.row.choice.guide is not None or drafter.is_promising()

    def _draft_tokens_max(self) -> int:
        """Return how many nodes a draft may have: the answer's last token is never fed.

        Without drafts it is not, either.
        """
        return min(self.row.remaining - 2, ROWS_MAX - len(self.waiting) - 1)

    def _step_by_draft(self) -> list[SampledToken]:
        """Return the token that was sampled last, and those of a draft behind it that it verifies.

        The draft may be empty.
        """
        row, token, logprobs = self.row, self.token, self.logprobs
        token_id: int = token.item()  # type: ignore[assignment]
        row.note([token_id])
        if row.choice.guide is not None:
            row.choice.guide.take([token_id])
        draft = self._draft()
        sampled = [self._sampled(token_id, logprobs)]
        row.fed.append(token_id)
        if draft:
            sampled += self._verify(token_id, draft)
        else:
            self._feed(token, len(row.fed))
        row.remaining -= len(sampled)
        return sampled

    def _draft(self) -> Draft:
        """Return a draft behind the tokens that are known, no longer than there is room for."""
        row = self.row
        assert row.drafter is not None
        if row.draft_model is not None:
            row.draft_model.look_at(self.cache)
        draft = row.drafter.propose(self._draft_tokens_max(), len(self.waiting) + 1)
        if row.draft_model is not None:
            row.draft_model.look_at(None)
        if draft and row.choice.guide is not None:
            assert draft.is_chain, "a guide follows one path"
            draft = draft.cut(row.choice.guide.fitting(draft.tokens))
        if draft:
            draft = draft.cut(row.before_draft(len(row.fed) + 1, len(draft)))
        return draft

    def _verify(self, token_id: int, draft: Draft) -> list[SampledToken]:
        """Feed the last returned token and a draft; return the tokens that the model says too.

        What it says behind them is sampled then.
        """
        row = self.row
        assert row.rewind_point is not None and row.drafter is not None
        known = [*self.waiting, token_id]
        point = row.rewind_point(self.cache)
        logits = self._forward_draft(known, draft)[0, len(self.waiting) :]
        logprobs = normalised(process_rows(row, token_id, draft, logits))
        chosen = row.choice.sampler(logprobs, row_places(row.place, draft))
        ids: list[int] = chosen.tolist()  # type: ignore[assignment]
        path = accepted_path(draft, ids)
        tokens = [draft.tokens[node] for node in path]
        row.drafter.note(draft, path, len(known) + len(draft))
        self._tell_draft_model(len(row.fed) - len(known), len(known) + len(path))
        self._keep(point, known, draft, path)
        row.take(tokens)
        last = path[-1] + 1 if path else 0
        self.token, self.logprobs = chosen[last : last + 1], logprobs[last : last + 1]
        behind = [0, *(node + 1 for node in path)]  # rows that the path's tokens were drawn in
        return [
            self._sampled(token, logprobs[at : at + 1], is_drafted=True)
            for token, at in zip(tokens, behind, strict=False)
        ]

    def _forward_draft(self, known: list[int], draft: Draft) -> mx.array:
        """Feed known tokens and a draft behind them; return logits (1, n, vocabulary)."""
        if draft.is_chain:
            return self._forward([*known, *draft.tokens])
        self._undo = None
        run = self.row.tree_forward
        assert run is not None, "this model's drafts have no branches"
        with applied(self.row.adapter):
            return run(known, draft.tokens, draft.parents, self.cache, self.row.shift)

    def _keep(self, point: ForwardUndo, known: list[int], draft: Draft, path: list[int]) -> None:
        """Have the cache hold no more of a forward than `known` tokens and the draft's `path`.

        Or have them wait, where it cannot leave out the rest alone.
        """
        kept = [*known, *(draft.tokens[node] for node in path)]
        self.waiting, self._undo = [], _Undo(point, kept)
        if len(path) == len(draft):
            return
        if point.keeps_rows:
            point.pick(len(draft), path)
        else:
            assert draft.is_chain, "branches are of layers that keep rows"
            point.back(len(known) + len(draft))
            self.waiting, self._undo = kept, None

    def _take_back(self, surplus: int) -> None:
        """Have the cache, and `waiting`, hold none of the last `surplus` tokens of a draft."""
        del self.row.fed[-surplus:]
        if self.waiting:
            del self.waiting[-surplus:]
            return
        assert self._undo is not None, "only a verified draft returns tokens that are too many"
        point, fed = self._undo.point, self._undo.fed
        self._undo = None
        if point.keeps_rows:
            point.cut(surplus)
        else:
            point.back(len(fed))
            self.waiting = fed[:-surplus]


@dataclass(frozen=True, slots=True)
class _Undo:
    """Takes back the last forward, of which the cache holds the tokens `fed`."""

    point: ForwardUndo
    fed: list[int]
