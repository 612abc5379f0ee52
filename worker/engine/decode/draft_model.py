"""Drafts with what was trained to say more tokens from the model's own hidden states.

It is mlx-vlm's, and is asked through what its loops ask it for: `reset`, `set_shared_kv`,
`accept_verified_tokens` and `draft_block`. A head (MTP) has KV of its own, of pairs: the hidden
state of a token, and the token behind that one. An assistant (Gemma 4's) has none: it attends to
the model's KV. Owner: the inference thread.
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

# Pairs that wait while nothing is drafted; the head begins anew behind those that are dropped.
# So many of the prompt's last ones are kept for it: 5 MB of a model of 5,120 in 16 bits.
PENDING_MAX: Final = 512
HELD_MAX: Final = 4096  # pairs that the head has KV of: 16 MB with four heads of 256 in 16 bits
_TRIED_TOKENS: Final = 4
_TRIALS: Final = 3


# Gives a layer's K and V of its last tokens as views, oldest first; None where packed.
RawRows = Callable[[Any], tuple[mx.array, mx.array] | None]


class DraftModel:
    """A head or an assistant, and the model whose embeddings and hidden states it works with.

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
        """`target` is mlx-vlm's model, `token_cost` a drafted token's in forwards of one row.

        `drafts` makes what follows a sequence, by default as a head does. `raw_rows` is what an
        assistant reads the model's KV with.
        """
        self.head = head
        self.target = target
        self.token_cost = token_cost
        self.raw_rows = raw_rows
        self._drafts = drafts or HeadDrafts

    @property
    def prompt_pairs_max(self) -> int:
        """How many of a prompt's last hidden states serve its drafts."""
        return PENDING_MAX if self._drafts is HeadDrafts else 0

    def follow(self) -> ModelDrafts:
        """Return what follows a new sequence."""
        return self._drafts(self)

    def measure(self, model: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Find out what a drafted token costs beside a forward of `model`."""
        cache = make_prompt_cache(model)
        forwards, drafts = [], []
        following = self.follow()
        for at in range(_TRIALS + 1):  # the first makes kernels and buffers
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
    """The head, with KV of one sequence (`ModelDrafts`).

    Invariant: it holds pairs of known tokens alone, and `_pending` has those behind them, up to the
    token before `_next`: nothing that it drafted itself stays.
    Owner: the inference thread.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        # Heads keep the KV of the sequence they draft for in themselves; the weights are shared.
        self._head = copy.copy(model.head)
        self._next = 0  # the place of the first token whose hidden state was not taken
        self._pending: list[tuple[mx.array, mx.array]] = []
        self._pending_count = 0  # pairs in it
        self._held: int | None = None  # pairs that the head has KV of; None = it begins anew
        self.token_cost = model.token_cost

    @property
    def held(self) -> int:
        """How many pairs the head attends to."""
        return self._held or 0

    def take(self, start: int, tokens: mx.array, hidden: mx.array) -> None:
        known = self._next - start
        if known < 0:  # tokens between were computed elsewhere, as in a batch
            self._pending, self._pending_count, self._held, known = [], 0, None, 0
        if known >= tokens.shape[0]:
            return
        if known:
            tokens, hidden = tokens[known:], hidden[:, known:]
        self._next = start + known + tokens.shape[0]
        if tokens.shape[0] > PENDING_MAX:
            tokens, hidden, self._held = tokens[-PENDING_MAX:], hidden[:, -PENDING_MAX:], None
        self._pending.append((tokens, hidden))
        self._pending_count += tokens.shape[0]
        while self._pending_count - self._pending[0][0].shape[0] >= PENDING_MAX:
            # The head, which would miss these pairs, begins anew.
            self._pending_count -= self._pending.pop(0)[0].shape[0]
            self._held = None

    def look_at(self, cache: Sequence[Any] | None) -> None:
        pass

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        if place != self._next or not self._pending or tokens_max < 1:
            return []
        tokens = mx.concatenate([tokens for tokens, _ in self._pending])
        hidden = mx.concatenate([hidden for _, hidden in self._pending], axis=1)
        self._pending, self._pending_count = [], 0
        count: int = tokens.shape[0]
        if self._held is None or self._held + count > HELD_MAX:
            # It begins with the pair of the first of these tokens, and attends to none before.
            self._head.reset(self._model.target)
            self._head.set_shared_kv({}, place - count)
            self._held = 0
        self._read(hidden, tokens[1:], [last])
        self._held = self.held + count
        drafted = self._head.draft_block(
            last, hidden[:, -1:], None, tokens_max + 1, _no_sampler, mx.int32, greedy=True
        )
        # What it made of its own tokens gives way to what the model will make of them.
        self._read(hidden[:, :0], tokens[:0], [])
        return cast(list[int], drafted[0].tolist())

    def _read(self, hidden: mx.array, tokens: mx.array, last: list[int]) -> None:
        """Have the head forget its own draft, and read known tokens, the first behind `hidden`."""
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
    """An assistant, which drafts from the last hidden state and the model's KV (`ModelDrafts`).

    It attends to the KV of the model's last layer of each type, of the whole prompt and answer.
    Views of that are held while it drafts, and no longer: MLX copies a buffer that is written
    where something else still holds it.
    Owner: the inference thread.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._head = model.head  # it is told all anew each time
        self._head.reset(model.target)
        language = getattr(model.target, "language_model", model.target)
        self._layer_types = [layer.layer_type for layer in language.layers]
        self._next = 0  # the place of the first token whose hidden state was not taken
        self._hidden: mx.array | None = None  # (1, 1, hidden), of the token before
        self._cache: Sequence[Any] | None = None
        self.token_cost = model.token_cost

    def take(self, start: int, tokens: mx.array, hidden: mx.array) -> None:
        end = start + tokens.shape[0]
        if end > self._next:
            self._next, self._hidden = end, hidden[:, -1:]

    def look_at(self, cache: Sequence[Any] | None) -> None:
        self._cache = cache

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        rows = self._rows() if place == self._next and tokens_max > 0 else None
        if rows is None:
            return []
        self._head.set_shared_kv(rows, place, position=max(place - 1, 0), kv_valid_len=place)
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
        """Return the last layer's K and V of each type; None where one is packed or not shown."""
        assert self._model.raw_rows is not None, "an assistant reads the model's KV"
        if self._cache is None:
            return None
        assert counted_depth(self._cache) == self._next, "what is drafted from is all in the cache"
        # Layers that share an earlier one's KV have none in the cache, and are the last ones.
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

    `model` is called as usual but for that, with the same `arguments`.
    """
    if hasattr(model, "with_hidden"):
        logits, hidden = model.with_hidden(ids, cache, **arguments)
        return logits, hidden
    # What mlx-lm's model does, in its two parts: its own call returns the logits alone.
    assert not arguments, "models of text alone take no more"
    spoken = getattr(model, "language_model", model)
    hidden = spoken.model(ids, cache=cache)
    is_tied = spoken.args.tie_word_embeddings
    logits = (spoken.model.embed_tokens.as_linear if is_tied else spoken.lm_head)(hidden)
    cap = getattr(spoken, "final_logit_softcapping", None)
    return logits if cap is None else logit_softcap(cap, logits), hidden


def is_like_alone(model: Any) -> bool:
    """Whether a model that is asked for its hidden states too has the same logits, to the bit."""
    ids = mx.array([[1, 2, 3, 4]])
    return bool(mx.array_equal(model(ids), with_hidden(model, ids)[0]).item())
