"""Puts an adapter's layers into the model for the length of one forward.

Between two forwards the model is the plain one, so that whatever else computes with it (trials,
checks, image encoders, draft models) need not know of adapters, and a request without one computes
as if there were none. Layers are exchanged by reference: nothing is copied, and what was computed
lazily keeps the arrays that it was built with.
Owner: the inference thread.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer:
    """One layer of the model, and what an adapter has in its place.

    `holder[key]` is where it stands: a module is a dict of its parts, and parts may be in a list.
    """

    holder: Any
    key: str | int
    plain: Any
    adapted: Any


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter of the loaded model. Immutable; its name is the model name that asks for it."""

    name: str
    identity: str  # of its bytes: KV of another one is never read
    layers: tuple[AdaptedLayer, ...]
    arrays: tuple[mx.array, ...]
    forward_bytes: int = 0  # that a forward takes beside the model's own ...
    token_bytes: int = 0  # ... and for each of its tokens

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    """All adapters of the loaded model, by name. Immutable."""

    by_name: Mapping[str, LoraAdapter] = field(default_factory=dict)

    def of(self, name: str) -> LoraAdapter | None:
        """Return the adapter of a name that the prompt threads let pass; "" = none."""
        return self.by_name[name] if name else None

    @property
    def identities(self) -> dict[str, str]:
        """Return by name what tells the bytes of each from all others."""
        return {name: adapter.identity for name, adapter in self.by_name.items()}

    @property
    def arrays(self) -> list[mx.array]:
        return [array for adapter in self.by_name.values() for array in adapter.arrays]

    @property
    def forward_bytes(self) -> int:
        """What the greediest forward takes beside the model's own ..."""
        return max((each.forward_bytes for each in self.by_name.values()), default=0)

    @property
    def token_bytes(self) -> int:
        """... and for each of its tokens."""
        return max((each.token_bytes for each in self.by_name.values()), default=0)

    def report(self) -> list[dict[str, Any]]:
        """Return for `/v1/cache` what is loaded."""
        rows = self.by_name.values()
        return [{"name": e.name, "layers": len(e.layers), "bytes": e.nbytes} for e in rows]


@contextmanager
def applied(adapter: LoraAdapter | None) -> Iterator[None]:
    """Have the model's forwards be those of `adapter`, until the end of the context.

    None = those of the plain model.
    """
    layers = adapter.layers if adapter is not None else ()
    for layer in layers:
        assert layer.holder[layer.key] is layer.plain, "two adapters share a forward"
        layer.holder[layer.key] = layer.adapted
    try:
        yield
    finally:
        for layer in layers:
            layer.holder[layer.key] = layer.plain
