"""Has a model's layers computed one by one, with a rest behind each, while answers stream.

A long text's forward holds the GPU for as long as all its layers take, and each token that a chat
decodes would wait for that. Between two layers the chat gets as much time as the layer took.
"""

import time
from typing import Any, Final

import mlx.core as mx

REST_S_MAX: Final = 1.0


class LayerRests:
    """Rests as long as was computed, where that is wanted. Owner: the main thread."""

    def __init__(self) -> None:
        self.are_wanted = False
        self.rested_s = 0.0  # since the start

    def clock(self) -> float:
        """Return a time in seconds that stands still while it rests."""
        return time.perf_counter() - self.rested_s

    def pace(self, layers: list[Any]) -> None:
        """Have each layer of a model's list of layers followed by a rest, where it is wanted."""
        layers[:] = [_PacedLayer(layer, self) for layer in layers]

    def rest(self, computed_s: float) -> None:
        if self.are_wanted and computed_s > 0:
            began = time.perf_counter()
            time.sleep(min(computed_s, REST_S_MAX))
            self.rested_s += time.perf_counter() - began


class _PacedLayer:
    """One layer, whose result is computed at once where rests are wanted."""

    def __init__(self, layer: Any, rests: LayerRests) -> None:
        self._layer, self._rests = layer, rests

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        outputs = self._layer(*inputs, **options)
        if self._rests.are_wanted:
            began = time.perf_counter()
            mx.eval(outputs)
            self._rests.rest(time.perf_counter() - began)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)  # models ask their layers what kind they are
