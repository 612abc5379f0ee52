"""The table of layer kinds, by the class name of the cache.

mlx-lm and mlx-vlm have separate classes of the same names. An installed package may add kinds by
entry points in the group `hearth.layer_kinds`: the name is that of the cache's class, the object an
instance of `LayerKind`. A model's directory never adds one.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache as cached
from importlib.metadata import entry_points
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.worker.kv.layer_kinds.deepseek_v41_kinds import DeepseekV41Kind, LayerCacheKind
from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, UnknownCache
from hearth.worker.kv.layer_kinds.pooled_kind import PooledKind
from hearth.worker.kv.layer_kinds.qsa_kind import QSAKind
from hearth.worker.kv.layer_kinds.row_kinds import (
    ChosenRowKind,
    IndexedRowKind,
    RingRowKind,
    RowKind,
)
from hearth.worker.kv.layer_kinds.state_kind import StateKind, Z1TKind
from hearth.worker.kv.layer_kinds.window_kind import SteppedWindowKind, WindowKind

ENTRY_POINTS: Final = "hearth.layer_kinds"
KINDS: Final[dict[str, LayerKind]] = {
    "KVCache": RowKind(),
    "QuantizedKVCache": RowKind(),
    "HyV4KVCache": ChosenRowKind(),
    "RingSlidingKVCache": RingRowKind(),
    "RotatingKVCache": WindowKind(),
    "ChunkedKVCache": WindowKind(),
    "OrderedRotatingKVCache": SteppedWindowKind(),
    "ArraysCache": StateKind(),
    "MambaCache": StateKind(),
    "Z1TCache": Z1TKind(),
    "QSAKVCache": QSAKind(),
    "MiniMaxM3KVCache": IndexedRowKind(),
    "PoolingCache": PooledKind(),
    "OverlappedPoolingCache": PooledKind(),
    "NoProjections": LayerKind(),
    "LayerCache": LayerCacheKind(),
    "DeepseekV41Cache": DeepseekV41Kind(),
}


# Kept for everybody: the packages that are installed
@cached
def added_kinds() -> dict[str, tuple[LayerKind, str]]:
    """Return (kind, version of its package) of each cache class that installed packages add.

    Raises:
        StartError: an entry point cannot be loaded, or is no instance of `LayerKind`.
    """
    found: dict[str, tuple[LayerKind, str]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        said = f"the entry point {point.name} = {point.value!r} in {ENTRY_POINTS}"
        try:
            kind = point.load()
        except Exception as error:  # any error of another's package
            raise StartError(f"{said} cannot be loaded: {error}") from error
        if not isinstance(kind, LayerKind):
            raise StartError(f"{said} is no instance of LayerKind, but {kind!r}")
        package = point.dist
        found[point.name] = kind, f"{package.name} {package.version}" if package else point.value
    return found


def added_versions(cache_layout: str) -> list[str]:
    """Return the packages that added kinds of a model's `cache_layout`, with their versions."""
    names = _class_names(cache_layout)
    return sorted({version for name, (_, version) in added_kinds().items() if name in names})


def kind_named(name: str) -> LayerKind | None:
    """Return the kind of caches of this class; None where the class is not known."""
    if name in KINDS:
        return KINDS[name]
    kind, _ = added_kinds().get(name, (None, ""))
    return kind


def kind_of(leaf: Any) -> LayerKind:
    """Return the kind of a layer's cache.

    Raises:
        UnknownCache: its class is not known.
    """
    kind = kind_named(type(leaf).__name__)
    if kind is None:
        raise UnknownCache(type(leaf).__name__)
    return kind


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """Yield the layers' caches; in place of a composite cache, yield its parts."""
    for layer in cache:
        children = getattr(layer, "caches", None)
        if children is None:
            yield layer
        else:
            yield from leaves(children)


def probe_tokens(cache: Sequence[Any]) -> int:
    """Return how many tokens a probe reads so that each layer's arrays exist. See `LayerMap`."""
    found = [kind_named(type(leaf).__name__) for leaf in leaves(cache)]
    wanted = [
        kind.probe_tokens(leaf) for kind, leaf in zip(found, leaves(cache), strict=True) if kind
    ]
    return max(wanted, default=1)


def kinds_in(cache_layout: str) -> list[LayerKind]:
    """Return the kinds of the classes in a model's `cache_layout`, e.g. "4 x KVCache"."""
    kinds = map(kind_named, _class_names(cache_layout))
    return [kind for kind in kinds if kind is not None]


def _class_names(cache_layout: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", cache_layout)
