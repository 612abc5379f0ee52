"""Has EmbeddingGemma's sliding layers look only as far as their window, which mlx-vlm leaves out.

Without it a text longer than the window, 257 tokens, gets another vector than the model was trained
to give. Source: transformers' Gemma3TextConfig and _bidirectional_window_overlay.
"""

from typing import Any, Final

import mlx.core as mx

_KIND: Final = "gemma3_text"


def hold_windows(model: Any, model_type: Any) -> None:
    """Have the layers of `model` that slide do so, in both directions."""
    if model_type != _KIND:
        return
    window = int(model.config.sliding_window) // 2 + 1
    layers = model.layers
    layers[:] = [
        _WindowedLayer(layer, window) if layer.self_attn.is_sliding else layer for layer in layers
    ]


class _WindowedLayer:
    """A layer in which a token attends to those that are less than a window away."""

    def __init__(self, layer: Any, window: int) -> None:
        self._layer, self._window = layer, window

    def __call__(self, hidden: mx.array, mask: mx.array, cache: Any = None) -> Any:
        length = mask.shape[-1]
        if length > self._window:
            at = mx.arange(length)
            is_far = mx.abs(at[:, None] - at[None, :]) >= self._window
            # Finite, since padding with nothing near would be no number, and spread.
            mask = mx.where(is_far, mx.array(mx.finfo(mask.dtype).min, mask.dtype), mask)
        return self._layer(hidden, mask, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
