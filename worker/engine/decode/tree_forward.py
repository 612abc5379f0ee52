"""Feeds a draft with branches, a tree, in one forward.

Each node attends to its ancestors alone, and its position follows from its depth. A model asks each
layer's cache for the mask and for the positions, so a wrapped cache is enough during the forward.
Upstream's ropes take one position for each batch row, so they are wrapped too. `make_tree_forward`
tries whether a model then computes correctly.
Owner: the inference thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn

from hearth.worker.engine.decode.shared_trunk import PLAIN

ROPE_NAMES: Final = ("rope", "rotary")  # parts of the class names of rotary embeddings


class TreeForward:
    """Runs a model's forwards of trees. The model's other forwards stay as they are.

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
        """Feed known tokens, at least one, and the tree after them; return the logits of all.

        The logits are (1, known + nodes, vocabulary). The cache grows by as many KV rows.
        A position is the number of tokens before it plus `shift`.
        """
        assert known and len(tokens) == len(parents), (known, tokens, parents)
        assert can_hold_trees(cache), [type(layer).__name__ for layer in cache]
        rows = [*range(-1, len(known) - 1), *(len(known) + parent for parent in parents)]
        cached = cache[0].offset
        # Each token attends to all cached rows and its ancestors: (rows, cached + rows).
        before = mx.ones((len(rows), cached), dtype=mx.bool_)
        mask = mx.concatenate([before, mx.array(ancestors(rows))], axis=1)
        positions = mx.array([cached + depth for depth in depths(rows)])  # (rows,)
        ids = mx.array([[*known, *tokens]], dtype=mx.uint32)
        if self._takes_positions:
            position_ids = self._model.placed(positions[None] + shift)
            layers = [_TreeLayer(layer, mask) for layer in cache]
            return cast(mx.array, self._model(ids, cache=layers, position_ids=position_ids))
        assert not shift, "a shift for a model that takes no positions"
        layers = [_TreeLayer(layer, mask, positions) for layer in cache]
        with _wrapped(self._ropes):
            return cast(mx.array, self._model(ids, cache=layers))


def can_hold_trees(cache: Sequence[Any]) -> bool:
    """Whether every layer keeps the plain KV rows of all tokens."""
    return bool(cache) and all(type(layer).__name__ == PLAIN for layer in cache)


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many ancestors each row has."""
    counts: list[int] = []
    for parent in parents:
        counts.append(counts[parent] + 1 if parent >= 0 else 0)
    return counts


def ancestors(parents: Sequence[int]) -> list[list[bool]]:
    """Return for each row the mask of the rows that it attends to: its ancestors and itself."""
    seen: list[list[bool]] = []
    for row, parent in enumerate(parents):
        own = list(seen[parent]) if parent >= 0 else [False] * len(parents)
        own[row] = True
        seen.append(own)
    return seen


class _TreeLayer:
    """Wraps a layer's cache for one forward of a tree. KV is written into the wrapped cache.

    `offset` is `positions` (rows,), one for each token, for a model that reads positions from the
    cache. All other attributes are those of the wrapped cache.
    """

    def __init__(self, layer: Any, mask: mx.array, positions: mx.array | None = None) -> None:
        self._layer, self._mask = layer, mask
        if positions is not None:
            self.offset = positions

    def make_mask(self, N: int, return_array: bool = False, window_size: Any = None) -> mx.array:
        """Return the tree's mask. Models get their mask from the cache."""
        if window_size is not None or self._mask.shape[0] != N:
            raise NotImplementedError(f"a tree of {N} rows in a window of {window_size}")
        return self._mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._layer.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class TokenRope:
    """A rope that takes positions (rows,) for the tokens of one sequence."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        """Rotate x (1, heads, rows, width). Each token is passed as a batch row of its own."""
        if not isinstance(offset, mx.array) or x.shape[0] != 1 or offset.shape != x.shape[2:3]:
            raise NotImplementedError("a rope that is not given a position for each token")
        turned: mx.array = self._rope(x.transpose(2, 1, 0, 3), offset=offset, **more)
        return turned.transpose(2, 1, 0, 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)


_Rope = tuple[Any, str, Any, TokenRope]  # (module, name in the module, rope, wrapped rope)


def _ropes(model: Any) -> Iterator[_Rope]:
    for _, module in (model if isinstance(model, nn.Module) else model.model).named_modules():
        for name, child in module.children().items():
            kind = type(child).__name__.lower()
            if isinstance(child, nn.Module) and any(part in kind for part in ROPE_NAMES):
                yield module, name, child, TokenRope(child)


@contextmanager
def _wrapped(ropes: Sequence[_Rope]) -> Iterator[None]:
    """Replace the model's ropes by the wrapped ones. A module is a dict of its parts."""
    try:
        for module, name, _, wrapped in ropes:
            module[name] = wrapped
        yield
    finally:
        for module, name, rope, _ in ropes:
            module[name] = rope
