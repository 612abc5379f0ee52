"""Feeds a draft with branches in one forward: a node sees its ancestors, at its depth's position.

A layer's cache tells a model which rows a token sees, and at which position it is, so that a cache
of one's own for the length of the forward is enough. Only a rope takes no more than one position
for a row of a batch: it is wrapped meanwhile. What a model makes of all that is tried.
Owner: the inference thread.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx import nn

from hearth.worker.engine.decode.batch_caches import (
    Unlike,
    as_floats,
    cut_error,
    filled_cache,
    logits_error,
    why_not_alike,
)
from hearth.worker.engine.vision.vlm_language_model import AXES

log = logging.getLogger(__name__)

LAYER: Final = "KVCache"  # of plain rows; mlx-lm's and mlx-vlm's are alike
ROPE_NAMES: Final = ("rope", "rotary")  # in the names of classes that turn rows by positions

# What is tried: two branches of unlike length behind some text, their nodes mixed.
TRIED_TOKENS: Final = 12
TRIED_PARENTS: Final = (-1, -1, 0, 1, 2)
TRIED_PATHS: Final = ((0, 2, 4), (1, 3))


class TreeForward:
    """Runs a model's forwards of trees. No other forward of the model is touched.

    Owner: the inference thread.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes_positions: bool = getattr(model, "takes_positions", False)
        self._ropes = [] if self._takes_positions else list(_ropes(model))

    def __call__(
        self,
        known: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int],
        cache: Sequence[Any],
        shift: int = 0,
    ) -> mx.array:
        """Feed known tokens, one at least, and the tree behind them; return all their logits.

        The logits are (1, known + nodes, vocabulary), and the cache holds as many rows more.
        `shift` is what positions differ from the number of tokens.
        """
        assert known and len(tokens) == len(parents), (known, tokens, parents)
        assert can_hold_trees(cache), [type(layer).__name__ for layer in cache]
        rows = [*range(-1, len(known) - 1), *(len(known) + parent for parent in parents)]
        held = cache[0].offset
        tree = _Tree(_mask(rows, held), mx.array([held + depth for depth in depths(rows)]))
        ids = mx.array([[*known, *tokens]], dtype=mx.uint32)
        if self._takes_positions:
            positions = mx.broadcast_to(tree.positions + shift, (AXES, *ids.shape))
            layers = [_TreeLayer(layer, tree.mask) for layer in cache]
            logits: mx.array = self._model(ids, cache=layers, position_ids=positions)
            return logits
        assert not shift, "a model that takes no positions has none to shift"
        with _wrapped(self._ropes):
            logits = self._model(ids, cache=[_RopedTreeLayer(layer, tree) for layer in cache])
        return logits


def can_hold_trees(cache: Sequence[Any]) -> bool:
    """Return whether every layer keeps plain rows of all tokens."""
    return bool(cache) and all(type(layer).__name__ == LAYER for layer in cache)


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many ancestors each row has."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def ancestors(parents: Sequence[int]) -> list[list[bool]]:
    """Return for each row which of all rows it sees: its ancestors and itself."""
    seen: list[list[bool]] = []
    for row, parent in enumerate(parents):
        own = list(seen[parent]) if parent >= 0 else [False] * len(parents)
        own[row] = True
        seen.append(own)
    return seen


def _mask(parents: Sequence[int], held: int) -> mx.array:
    """Return (rows, held + rows): which rows each sees, those before the tree among them."""
    before = mx.ones((len(parents), held), dtype=mx.bool_)
    return mx.concatenate([before, mx.array(ancestors(parents))], axis=1)


@dataclass(frozen=True, slots=True)
class _Tree:
    mask: mx.array  # (rows, all rows)
    positions: mx.array  # (rows,)


class _TreeLayer:
    """A layer's cache for one forward of a tree, which writes into the layer's own.

    Attributes that it has not are the layer's.
    """

    def __init__(self, layer: Any, mask: mx.array) -> None:
        self._layer, self._mask = layer, mask

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> mx.array:
        """Return which rows each token sees, as models ask of a cache."""
        if window_size is not None or self._mask.shape[0] != N:
            raise NotImplementedError(f"a tree of {N} rows in a window of {window_size}")
        return self._mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._layer.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _RopedTreeLayer(_TreeLayer):
    """The same for a model that takes a position from the cache: it gets one for each token."""

    def __init__(self, layer: Any, tree: _Tree) -> None:
        super().__init__(layer, tree.mask)
        self.offset = tree.positions


class TokenRope:
    """A rope that takes positions (rows,) for the tokens of one sequence."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        """Turn x (1, heads, rows, width); each token is given as a sequence of its own."""
        if not isinstance(offset, mx.array) or x.shape[0] != 1 or offset.shape != x.shape[2:3]:
            raise NotImplementedError("a rope that is not given a position for each token")
        turned: mx.array = self._rope(x.transpose(2, 1, 0, 3), offset=offset, **more)
        return turned.transpose(2, 1, 0, 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)


_Rope = tuple[Any, str, Any, TokenRope]  # who holds it, by which name, itself, wrapped


def _ropes(model: Any) -> Iterator[_Rope]:
    modules = model if isinstance(model, nn.Module) else model.model
    for _, module in modules.named_modules():
        for name, child in module.children().items():
            kind = type(child).__name__.lower()
            if isinstance(child, nn.Module) and any(part in kind for part in ROPE_NAMES):
                yield module, name, child, TokenRope(child)


@contextmanager
def _wrapped(ropes: Sequence[_Rope]) -> Iterator[None]:
    """Have the model call its ropes wrapped. A module is a dict of its parts, in their order."""
    try:
        for module, name, _, wrapped in ropes:
            module[name] = wrapped
        yield
    finally:
        for module, name, rope, _ in ropes:
            module[name] = rope


# ------------------------------------------------------------ whether a model can


def make_tree_forward(model: Any, new_cache: Callable[[], list[Any]]) -> TreeForward | None:
    """Return what runs forwards of trees, None where the model computes others in them.

    Takes eleven forwards of at most 16 tokens; up to three times as many, and one for each, where
    the first fails.
    """
    if not can_hold_trees(new_cache()):
        return None
    reason = why_not_alike(lambda text: _errors(model, new_cache, text))
    if reason is None:
        return TreeForward(model)
    log.info("drafts have no branches, as the model cannot compute them: %s", reason)
    return None


def _errors(model: Any, new_cache: Callable[[], list[Any]], text: int) -> Unlike:
    """Return how unlike logits in a tree are to those token by token."""
    prompt = [7 + 11 * text + (5 + 3 * text) * n % 97 for n in range(TRIED_TOKENS)]
    known, tokens = [41 + text], [13 + 17 * text + 3 * node for node in range(len(TRIED_PARENTS))]
    cache = filled_cache(model, new_cache, prompt)
    together = TreeForward(model)(known, tokens, TRIED_PARENTS, cache)[0]
    errors = []
    for path in TRIED_PATHS:
        cache = filled_cache(model, new_cache, prompt)
        for row in (0, *(len(known) + node for node in path)):
            alone = model(mx.array([[[*known, *tokens][row]]]), cache=cache)[0, -1]
            errors.append(logits_error(as_floats(together[row]), as_floats(alone)))
    whole = [*prompt, *known, *(tokens[node] for node in TRIED_PATHS[-1])]
    return float(np.max(errors)), lambda: cut_error(model, new_cache, whole, as_floats(alone))
