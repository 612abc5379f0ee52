"""Drafts with a small model that was trained to predict tokens from the main model's hidden states.

Mlx-vlm implements these models. They are called as in mlx-vlm's own loops: `reset`,
`set_shared_kv`, `accept_verified_tokens` and `draft_block`. There are two kinds. A head (MTP) has
its own KV, with an entry for each pair of a token's hidden state and the next token. An assistant
(of Gemma 4) has no KV: it attends to the main model's KV.
Owner: the inference thread.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gemma4_text import logit_softcap

from hearth.worker.draft.draft import ModelDrafts
from hearth.worker.engine.vision.vlm_language_model import counted_depth

# Pairs kept of a prompt, and while nothing is drafted: 5 MB for a hidden size of 5,120 in 16 bits.
# If more come, the oldest are dropped and the head starts again after the dropped pairs.
PENDING_MAX: Final = 512
PAIRS_MAX: Final = 4096  # pairs in the head's KV: 16 MB with four attention heads of 256 in 16 bits
_TRIED_TOKENS: Final = 4
_TRIALS: Final = 3


# (a layer's cache) -> views of the last tokens' K and V, oldest first; None if they are quantised
RawRows = Callable[[Any], tuple[mx.array, mx.array] | None]


class DraftModel:
    """A head or an assistant, and its target: the main model with the embeddings that it uses.

    Owner: the inference thread.
    """

    def __init__(
        self,
        head: Any,
        target: Any,
        token_cost: float = 0.0,
        drafts: "Callable[[DraftModel], ModelDrafts] | None" = None,
        raw_rows: RawRows | None = None,
    ) -> None:
        """`token_cost` is the cost of a drafted token, in the target's forwards of one token.

        `target` is mlx-vlm's model. `drafts` makes the drafts of one sequence, by default
        HeadDrafts. An assistant reads the target's KV by `raw_rows`.
        """
        self.head = head
        self.target = target
        self.token_cost = token_cost
        self.raw_rows = raw_rows
        self._drafts = drafts or HeadDrafts

    @property
    def prompt_pairs_max(self) -> int:
        """How many of a prompt's last hidden states the drafts can use."""
        return PENDING_MAX if self._drafts is HeadDrafts else 0

    def follow(self) -> ModelDrafts:
        """Return the drafts of a new sequence."""
        return self._drafts(self)

    def measure(self, model: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure `token_cost`: a drafted token's time, divided by a forward's of `model`."""
        cache = make_prompt_cache(model)
        forwards, drafts = [], []
        following = self.follow()
        for at in range(_TRIALS + 1):  # the first trial compiles kernels and is not counted
            began = clock()
            ids = mx.array([at + 1])
            logits, hidden = with_hidden(model, ids[None], cache)
            mx.eval(logits, hidden)
            forwards.append(clock() - began)
            following.take(at, ids, hidden)
            following.look_at(cache)
            began = clock()
            following.draft(at + 1, at + 2, _TRIED_TOKENS)
            drafts.append(clock() - began)
            following.look_at(None)
        self.token_cost = min(drafts[1:]) / _TRIED_TOKENS / max(min(forwards[1:]), 1e-9)


class HeadDrafts:
    """Drafts for one sequence by a head, with the head's KV (`ModelDrafts`).

    Invariant: the head's KV has pairs of known tokens alone, none of its own drafts. `_pending` has
    the later pairs, up to the token before `_next`.
    Owner: the inference thread.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        # A head object keeps one sequence's KV; its copy shares the weights.
        self._head = copy.copy(model.head)
        self._next = 0  # position of the first token without a hidden state
        self._pending: list[tuple[mx.array, mx.array]] = []
        self._pending_count = 0  # pairs in `_pending`
        self._read_count: int | None = None  # pairs in the head's KV; None = to be reset
        self.token_cost = model.token_cost

    @property
    def read_count(self) -> int:
        """The number of pairs in the head's KV."""
        return self._read_count or 0

    def take(self, start: int, tokens: mx.array, hidden: mx.array) -> None:
        known = self._next - start
        if known < 0:  # the tokens in between were computed in a batch
            self._pending, self._pending_count, self._read_count, known = [], 0, None, 0
        if known >= tokens.shape[0]:
            return
        if known:
            tokens, hidden = tokens[known:], hidden[:, known:]
        self._next = start + known + tokens.shape[0]
        if tokens.shape[0] > PENDING_MAX:
            tokens, hidden, self._read_count = tokens[-PENDING_MAX:], hidden[:, -PENDING_MAX:], None
        self._pending.append((tokens, hidden))
        self._pending_count += tokens.shape[0]
        while self._pending_count - self._pending[0][0].shape[0] >= PENDING_MAX:
            # The head is reset, as it would miss these pairs.
            self._pending_count -= self._pending.pop(0)[0].shape[0]
            self._read_count = None

    def look_at(self, cache: Sequence[Any] | None) -> None:
        pass

    def draft(self, position: int, last: int, tokens_max: int) -> list[int]:
        if position != self._next or not self._pending or tokens_max < 1:
            return []
        tokens = mx.concatenate([tokens for tokens, _ in self._pending])
        hidden = mx.concatenate([hidden for _, hidden in self._pending], axis=1)
        self._pending, self._pending_count = [], 0
        count: int = tokens.shape[0]
        if self._read_count is None or self._read_count + count > PAIRS_MAX:
            # The head's KV begins with the first pending pair.
            self._head.reset(self._model.target)
            self._head.set_shared_kv({}, position - count)
            self._read_count = 0
        self._read(hidden, tokens[1:], [last])
        self._read_count = self.read_count + count
        drafted = self._head.draft_block(
            last, hidden[:, -1:], None, tokens_max + 1, _no_sampler, mx.int32, greedy=True
        )
        # Remove the pairs of the head's own draft: the model's hidden states will replace them.
        self._read(hidden[:, :0], tokens[:0], [])
        return cast(list[int], drafted[0].tolist())

    def _read(self, hidden: mx.array, tokens: mx.array, last: list[int]) -> None:
        """Remove the head's own draft from its KV, and append pairs of `hidden` and next tokens."""
        self._head.accept_verified_tokens(
            hidden,
            tokens.astype(mx.int32)[None],
            tokens.shape[0],
            last,
            _no_sampler,
            mx.int32,
            greedy=True,
        )


class AssistantDrafts:
    """Drafts by an assistant from the last hidden state and the model's KV (`ModelDrafts`).

    An assistant attends to the KV of the model's last layer of each type, over the whole prompt and
    answer. It holds views of this KV only while it drafts: a write copies a buffer that has views.
    Owner: the inference thread.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._head = model.head  # keeps no state from one draft to the next
        self._head.reset(model.target)
        language = getattr(model.target, "language_model", model.target)
        self._layer_types = [layer.layer_type for layer in language.layers]
        self._next = 0  # position of the first token without a hidden state
        self._hidden: mx.array | None = None  # (1, 1, hidden), of the token before `_next`
        self._cache: Sequence[Any] | None = None
        self.token_cost = model.token_cost

    def take(self, start: int, tokens: mx.array, hidden: mx.array) -> None:
        end = start + tokens.shape[0]
        if end > self._next:
            self._next, self._hidden = end, hidden[:, -1:]

    def look_at(self, cache: Sequence[Any] | None) -> None:
        self._cache = cache

    def draft(self, position: int, last: int, tokens_max: int) -> list[int]:
        rows = self._rows() if position == self._next and tokens_max > 0 else None
        if rows is None:
            return []
        self._head.set_shared_kv(
            rows, position, position=max(position - 1, 0), kv_valid_len=position
        )
        drafted = self._head.draft_block(
            last,
            self._hidden,
            None,
            tokens_max + 1,
            partial(mx.argmax, axis=-1),
            mx.int32,
            greedy=True,
        )
        ids: list[int] = drafted[0].tolist()
        self._head.set_shared_kv({}, 0)
        return ids

    def _rows(self) -> dict[str, tuple[mx.array, mx.array]] | None:
        """Return K and V of the last layer of each type; None if quantised or not given."""
        assert self._model.raw_rows is not None, "an assistant has no reader of the model's KV"
        if self._cache is None:
            return None
        assert counted_depth(self._cache) == self._next, "the cache lacks known tokens"
        # The last layers may share earlier layers' KV; such layers are not in the cache.
        last_layers = dict(zip(self._layer_types, self._cache, strict=False))
        found = {name: self._model.raw_rows(layer) for name, layer in last_layers.items()}
        rows = {name: pair for name, pair in found.items() if pair is not None}
        return rows if len(rows) == len(found) else None


def _no_sampler(_logits: mx.array) -> mx.array:
    raise AssertionError("the head says its likeliest tokens")


def with_hidden(
    model: Any, ids: mx.array, cache: list[Any] | None = None, **arguments: Any
) -> tuple[mx.array, mx.array]:
    """Return logits (rows, n, vocabulary) and hidden states (rows, n, hidden) of `ids` (rows, n).

    `cache` and `arguments` are those of a usual call of `model`.
    """
    if hasattr(model, "with_hidden"):
        logits, hidden = model.with_hidden(ids, cache, **arguments)
        return logits, hidden
    # The two parts of a call of mlx-lm's model, which itself returns the logits alone.
    assert not arguments, "mlx-lm's models take no other arguments"
    language = getattr(model, "language_model", model)
    hidden = language.model(ids, cache=cache)
    is_tied = language.args.tie_word_embeddings
    logits = (language.model.embed_tokens.as_linear if is_tied else language.lm_head)(hidden)
    cap = getattr(language, "final_logit_softcapping", None)
    return logits if cap is None else logit_softcap(cap, logits), hidden


def is_like_alone(model: Any) -> bool:
    """Whether `with_hidden` gives bit by bit the same logits as a usual call."""
    ids = mx.array([[1, 2, 3, 4]])
    return bool(mx.array_equal(model(ids), with_hidden(model, ids)[0]).item())
