"""Puts an adapter's layers into the model during one forward.

Between two forwards the model has its own layers. So other users of the model (trials, checks,
image encoders, draft models) need no code for adapters, and a request without an adapter computes
as if there were none. Layers are exchanged by reference, and nothing is copied. Lazy arrays keep
the weights that they were built with.
Owner: the inference thread.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLayer:
    """One layer of the model, and an adapter's layer to replace it.

    The layer is `holder[key]`. The holder is a module (a dict of its parts) or a list of parts.
    """

    holder: Any
    key: str | int
    plain: Any
    adapted: Any


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter of the loaded model. Immutable. Requests select it by `name` as their model."""

    name: str
    identity: str  # hash of its files, so that KV of other adapters is never read
    layers: tuple[AdaptedLayer, ...]
    arrays: tuple[mx.array, ...]
    forward_bytes: int = 0  # memory of a forward, added to the model's own
    token_bytes: int = 0  # memory for each token of a forward, added to the model's own

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    """All adapters of the loaded model, by name. Immutable."""

    by_name: Mapping[str, LoraAdapter] = field(default_factory=dict)

    def of(self, name: str) -> LoraAdapter | None:
        """Return the adapter of a name that the prompt threads accepted; "" = none."""
        return self.by_name[name] if name else None

    @property
    def identities(self) -> dict[str, str]:
        """The identities by adapter name."""
        return {name: adapter.identity for name, adapter in self.by_name.items()}

    @property
    def arrays(self) -> list[mx.array]:
        return [array for adapter in self.by_name.values() for array in adapter.arrays]

    @property
    def forward_bytes(self) -> int:
        """Memory of the largest forward with an adapter, added to the model's own."""
        return max((adapter.forward_bytes for adapter in self.by_name.values()), default=0)

    @property
    def token_bytes(self) -> int:
        """Memory for each token of a forward with an adapter, added to the model's own."""
        return max((adapter.token_bytes for adapter in self.by_name.values()), default=0)

    def report(self) -> list[dict[str, Any]]:
        """Return the loaded adapters for `/v1/cache`."""
        adapters = self.by_name.values()
        return [{"name": a.name, "layers": len(a.layers), "bytes": a.nbytes} for a in adapters]


@contextmanager
def applied(adapter: LoraAdapter | None) -> Iterator[None]:
    """Put an adapter's layers into the model until the context ends; None = no adapter."""
    layers = adapter.layers if adapter is not None else ()
    for layer in layers:
        assert layer.holder[layer.key] is layer.plain, "two adapters share a forward"
        layer.holder[layer.key] = layer.adapted
    try:
        yield
    finally:
        for layer in layers:
            layer.holder[layer.key] = layer.plain
