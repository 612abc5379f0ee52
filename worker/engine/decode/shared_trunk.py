"""Keeps the KV that several rows of a batch begin with once, and each row's own behind it.

Rows that share a trunk attend the same arrays for it: see `trunk_attention.py`. Layers that keep no
plain rows (states, windows, packed rows) know nothing of trunks.
Owner: the inference thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import mlx.core as mx

PLAIN: Final = "KVCache"  # mlx-lm's and mlx-vlm's are alike
# Tails grow by upstream's 256 tokens, or by fewer: rows without tokens yet are at most this part of
# all, as short tails behind a trunk would else be mostly that.
SPARE_SHARE: Final = 1 / 32
STEP_MIN: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrunk:
    """The first rows of one layer: K and V (1, heads, tokens, width). Never written again."""

    keys: mx.array
    values: mx.array

    @property
    def length(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Trunk:
    """The first `length` tokens of several rows of one lineage, and their KV.

    A layer is cut from the first row that joins on it, and then stays as it is.
    """

    length: int
    layers: dict[int, LayerTrunk] = field(default_factory=dict)  # by their number in the model

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())


@dataclass(frozen=True, slots=True)
class TailKVCache:
    """One row's own KV in a layer, whose first rows are a trunk's. No model is given one."""

    tail: Any  # upstream's KVCache
    trunk: LayerTrunk

    @property
    def offset(self) -> int:
        return self.trunk.length + int(self.tail.offset)

    @property
    def state(self) -> Any:
        return self.tail.state

    @property
    def nbytes(self) -> int:
        return int(self.tail.nbytes)

    def whole(self) -> Any:
        """Return upstream's cache of all of it, a copy. Evaluated."""
        return _lone_of(self.tail, *_rows(self, 0, self.offset))


class TrunkedKVCache:
    """The KV of a batch's rows in one layer: a trunk for some of them, and each row's own tail.

    Does what upstream's BatchKVCache does, under the same names. It holds one, of the tails, and
    hides its `left_padding`: mlx-vlm's Qwen3.5 has attention of its own for a cache with that.
    What `update_and_fetch` returns and `make_mask` masks are the tails; positions (`offset`) count
    the trunk. Invariant: each row has a tail of at least one token.
    Owner: the inference thread.
    """

    def __init__(self, tails: Any, trunks: Sequence[LayerTrunk | None]) -> None:
        self.tails = tails
        self.trunks = list(trunks)
        lengths = [trunk.length if trunk is not None else 0 for trunk in trunks]
        self.offset = tails.offset + mx.array(lengths)  # (rows,)
        self._note_groups()

    def _note_groups(self) -> None:
        rows: dict[LayerTrunk | None, list[int]] = {}
        for number, trunk in enumerate(self.trunks):
            rows.setdefault(trunk, []).append(number)
        without = rows.pop(None, [])
        self.groups = [(trunk, mx.array(of)) for trunk, of in rows.items() if trunk is not None]
        self.without = len(without)  # rows that have no trunk: the last of `order`
        order = [number for of in rows.values() for number in of] + without
        of_trunks = sum(trunk.length for trunk, _ in self.groups)
        held = of_trunks + len(self.trunks) * int(self.tails.size())
        step = int(held * SPARE_SHARE / len(self.trunks))
        self.tails.step = min(type(self.tails).step, max(STEP_MIN, step))
        places = sorted(range(len(order)), key=lambda place: order[place])
        # Where each row stands among those of `groups`, one group behind the other.
        self.places = None if places == list(range(len(order))) else mx.array(places)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows (batch, heads, n, width) of the next tokens; return those of the tails."""
        self.offset = self.offset + keys.shape[2]
        return cast(tuple[mx.array, mx.array], self.tails.update_and_fetch(keys, values))

    def make_mask(self, N: int, return_array: bool = False, **more: Any) -> mx.array:
        """Return which rows of its tail each of the next `N` tokens may see."""
        if more.get("window_size") is not None:
            raise NotImplementedError("a window over rows that have a trunk")
        return cast(mx.array, self.tails.make_mask(N, return_array=return_array, **more))

    def filter(self, batch_indices: list[int]) -> None:
        """Keep these rows, in this order."""
        self.tails.filter(batch_indices)
        self.offset = self.offset[mx.array(batch_indices)]
        self.trunks = [self.trunks[number] for number in batch_indices]
        self._note_groups()

    def extend(self, other: "TrunkedKVCache") -> None:
        """Take in the rows of another batch, behind those here."""
        self.tails.extend(other.tails)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.trunks += other.trunks
        self._note_groups()

    def extract(self, idx: int) -> Any:
        """Return a row in a cache of its own: upstream's, or its tail where it has a trunk."""
        tail, trunk = self.tails.extract(idx), self.trunks[idx]
        return tail if trunk is None else TailKVCache(tail, trunk)

    def without_trunks(self) -> Any:
        """Return upstream's batch cache, which holds all where no row has a trunk any more."""
        assert not self.groups, "rows of a trunk are in no tail"
        self.tails.step = type(self.tails).step
        return self.tails

    def size(self) -> int:
        return int(self.tails.size())

    def empty(self) -> bool:
        return False

    @property
    def state(self) -> Any:
        return self.tails.state, self.offset

    @property
    def nbytes(self) -> int:
        """The bytes of the tails: who counts trunks counts each once."""
        return int(self.tails.nbytes)


def can_stand_on_trunk(layer: Any) -> bool:
    """Whether a lone cache's layer keeps plain rows, so that its first may be a trunk's."""
    return isinstance(layer, TailKVCache) or type(layer).__name__ == PLAIN


def merge_on_trunks(
    caches: Sequence[Any], trunks: Sequence[Trunk | None], number: int
) -> TrunkedKVCache:
    """Return layer `number` of a batch of these rows, each on the trunk beside it.

    A trunk that has no such layer yet gets it from the first row that stands on it.
    """
    tails: list[Any] = []
    layers: list[LayerTrunk | None] = []
    for cache, trunk in zip(caches, trunks, strict=True):
        if trunk is None:
            assert not isinstance(cache, TailKVCache), "a row loses its trunk by `whole` only"
            tails.append(cache)
            layers.append(None)
            continue
        assert trunk.length < cache.offset, (trunk.length, cache.offset)
        if number not in trunk.layers:
            trunk.layers[number] = LayerTrunk(*_rows(cache, 0, trunk.length))
        layer = trunk.layers[number]
        if isinstance(cache, TailKVCache) and cache.trunk is layer:
            tails.append(cache.tail)
        else:
            lone = cache.tail if isinstance(cache, TailKVCache) else cache
            tails.append(_lone_of(lone, *_rows(cache, trunk.length, int(cache.offset))))
        layers.append(layer)
    return TrunkedKVCache(tails[0].merge(tails), layers)


def whole_rows(cache: list[Any]) -> None:
    """Give a lone cache copies of its trunk's rows, a layer at a time."""
    for number, layer in enumerate(cache):
        if isinstance(layer, TailKVCache):
            cache[number] = layer.whole()


def _rows(cache: Any, start: int, end: int) -> tuple[mx.array, mx.array]:
    """Return copies of the K and V of the tokens [start, end) of a lone cache. Evaluated."""
    parts: list[tuple[Any, int]] = [(cache, 0)]  # and the token that each begins with
    if isinstance(cache, TailKVCache):
        parts = [(cache.trunk, 0), (cache.tail, cache.trunk.length)]
    found = []
    for name in ("keys", "values"):
        rows = [
            getattr(part, name)[..., max(0, start - first) : max(0, end - first), :]
            for part, first in parts
        ]
        found.append(mx.contiguous(mx.concatenate(rows, axis=2)))
    mx.eval(found)
    return found[0], found[1]


def _lone_of(like: Any, keys: mx.array, values: mx.array) -> Any:
    """Return a lone cache of the class of `like` that holds these rows."""
    lone = type(like)()
    lone.keys, lone.values, lone.offset = keys, values, keys.shape[2]
    return lone
