"""Calls the language model of an mlx-vlm model as mlx-lm's models are called.

Owner: the inference thread.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx.utils import tree_map

AXES: Final = 3  # axes of mRoPE's positions: time, height and width


class VLMLanguageModel:
    """A language model with forwards that depend on their arguments only.

    Mlx-vlm's models with mRoPE remember the last request's positions, and use them in a call
    without positions. With several requests these would be wrong, so here each call has positions.
    """

    def __init__(self, model: Any, make_cache: Callable[[], list[Any]]) -> None:
        self.model = model
        self.make_cache = make_cache  # returns empty caches of mlx-vlm's classes, one per layer
        self.input_dtype: mx.Dtype | None = None  # for inputs made of images; None = not cast

    @functools.cached_property
    def position_axes(self) -> int:
        """The axes of the model's positions: 3 is mRoPE; 0 = it counts positions by itself."""
        return _position_axes(self.model, self.make_cache)

    @property
    def takes_positions(self) -> bool:
        """Whether each call needs positions."""
        return self.position_axes > 0

    def placed(self, positions: mx.array) -> mx.array:
        """Return `positions` (rows, n), or (3, rows, n), in the shape that the model takes."""
        if self.position_axes == AXES:
            return mx.broadcast_to(positions, (AXES, *positions.shape[-2:]))
        return positions if positions.ndim == 2 else positions[0]

    def __call__(
        self,
        ids: mx.array,
        cache: list[Any] | None = None,
        shift: int | list[int] = 0,
        **embeds: Any,
    ) -> mx.array:
        """Return the logits (rows, n, vocabulary) of `ids` (rows, n) after the tokens in `cache`.

        A token's position is the number of tokens before it plus `shift`, one for all rows or one
        per row: images take fewer positions than tokens. `embeds` are inputs_embeds
        (1, n, hidden) and the other arguments for tokens of images.
        """
        return cast(mx.array, self._output(ids, cache, shift, embeds).logits)

    def with_hidden(
        self,
        ids: mx.array,
        cache: list[Any] | None = None,
        shift: int | list[int] = 0,
        **embeds: Any,
    ) -> tuple[mx.array, mx.array]:
        """Return the logits, and the hidden states (rows, n, hidden) for a draft model.

        Some models return the hidden states before the last norm, and have a method to prepare
        them.
        """
        output = self._output(ids, cache, shift, {"return_hidden": True, **embeds})
        hidden = output.hidden_states[-1]
        prepare = getattr(self.model, "speculative_draft_hidden", None)
        return output.logits, hidden if prepare is None else prepare(hidden)

    def _output(
        self,
        ids: mx.array,
        cache: list[Any] | None,
        shift: int | list[int],
        arguments: dict[str, Any],
    ) -> Any:
        """Return mlx-vlm's output for `ids`, with their positions after `cache`."""
        if self.takes_positions and "position_ids" not in arguments:
            depth = _counted(cache) if cache else 0  # an array (rows,) for a batch
            assert depth is not None, "no layer of this model counts tokens for positions"
            before = mx.array(depth, dtype=mx.int32) + mx.array(shift, dtype=mx.int32)
            positions = before.reshape(-1, 1) + mx.arange(ids.shape[1], dtype=mx.int32)
            arguments["position_ids"] = self.placed(positions)
        return self.model(ids, cache=cache, **arguments)

    def cast_inputs(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that mlx-vlm made of images, cast to this model's dtype.

        A vision tower may have another dtype, and MLX computes two dtypes together in float32.
        """
        if self.input_dtype is None:
            return dict(made)
        return {name: tree_map(self._cast, value) for name, value in made.items()}

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)
        return value.astype(self.input_dtype) if is_float else value

    def parameters(self) -> Any:
        return self.model.parameters()

    @property
    def layers(self) -> Sequence[Any]:
        return cast(Sequence[Any], self.model.layers)


def counted_depth(cache: Sequence[Any]) -> int | None:
    """Return how many tokens the cache holds; None if no layer counts them, as in some hybrids."""
    counted = _counted(cache)
    return None if counted is None else int(counted)


def _counted(cache: Sequence[Any]) -> Any:
    """Return the count of the first layer, or part of a layer, that counts tokens."""
    parts = (part for layer in cache for part in getattr(layer, "caches", (layer,)))
    return next((part.offset for part in parts if hasattr(part, "offset")), None)


def _position_axes(model: Any, make_cache: Callable[[], list[Any]]) -> int:
    """Return 3 for a model that takes positions (3, rows, n), 1 for (rows, n), else 0.

    A few models have another layout (Ernie's is (rows, n, 3)); they count positions by themselves.
    """
    if not hasattr(model, "get_rope_index"):
        return 0
    count = AXES + 2  # unlike the number of axes, so that the layout shows
    ids = mx.zeros((1, count), dtype=mx.int32)
    positions, _ = model.get_rope_index(ids)
    if positions.shape != (1, count):
        return AXES if positions.shape == (AXES, 1, count) else 0
    # Many tell one axis for text alone and take three, which images need. Nothing is evaluated.
    positions = mx.broadcast_to(positions, (AXES, 1, count))
    try:
        logits = model(ids, cache=make_cache(), position_ids=positions).logits
    except Exception:  # upstream refuses the shape in a way of its own
        return 1
    return AXES if logits.shape[:2] == ids.shape else 1
