"""Keeps the KV of a prefix that several batch rows share, a trunk, once for all of them.

Each batch row keeps only the KV after its trunk, its tail. All rows on a trunk attend to the same
arrays: see `trunk_attention.py`. Only layers that keep the plain KV of every token have trunks:
recurrent states, sliding windows and quantised KV have none.
Owner: the inference thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import mlx.core as mx

PLAIN: Final = "KVCache"  # the same name in mlx-lm and mlx-vlm
# Buffers of tails grow by upstream's 256 tokens, or by fewer. The unused part is at most this share
# of all KV; short tails after a trunk would otherwise be mostly unused.
SPARE_SHARE: Final = 1 / 32
STEP_MIN: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrunk:
    """A trunk's KV in one layer: K and V (1, heads, tokens, width). Never written again."""

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
    """The first `length` tokens of several sequences of one lineage, and their KV.

    The KV of a layer is copied from the first sequence that joins on the trunk. It never changes.
    """

    length: int
    layers: dict[int, LayerTrunk] = field(default_factory=dict)  # by the layer's number

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())


@dataclass(frozen=True, slots=True)
class TailKVCache:
    """One sequence's KV in a layer: a trunk and the tail after it. Models never see this class."""

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
        """Return a copy of trunk and tail in upstream's cache, evaluated."""
        return _single_cache(self.tail, *_copied_kv(self, 0, self.offset))


class TrunkedKVCache:
    """The KV of a batch in one layer: trunks for some of its rows, and a tail for each row.

    It does what upstream's BatchKVCache does, under the same names. A BatchKVCache holds the tails.
    Its `left_padding` is hidden: with this attribute mlx-vlm's Qwen3.5 uses another attention.
    `update_and_fetch` returns the tails alone, and `make_mask` masks the tails alone. `offset`
    counts the trunk's tokens too.
    Invariant: each row has a tail of at least one token.
    Owner: the inference thread.
    """

    def __init__(self, tails: Any, trunks: Sequence[LayerTrunk | None]) -> None:
        self.tails = tails
        self.trunks = list(trunks)
        lengths = [trunk.length if trunk is not None else 0 for trunk in trunks]
        self.offset = tails.offset + mx.array(lengths)  # (rows,)
        self._group_rows()

    def _group_rows(self) -> None:
        rows: dict[LayerTrunk | None, list[int]] = {}
        for number, trunk in enumerate(self.trunks):
            rows.setdefault(trunk, []).append(number)
        without = rows.pop(None, [])
        self.groups = [
            (trunk, mx.array(numbers)) for trunk, numbers in rows.items() if trunk is not None
        ]
        self.rows_without_trunk = len(without)  # the last ones of `order`
        order = [number for numbers in rows.values() for number in numbers] + without
        trunk_tokens = sum(trunk.length for trunk, _ in self.groups)
        tokens = trunk_tokens + len(self.trunks) * int(self.tails.size())
        step = int(tokens * SPARE_SHARE / len(self.trunks))
        self.tails.step = min(type(self.tails).step, max(STEP_MIN, step))
        indices = sorted(range(len(order)), key=lambda index: order[index])
        # The index of each row when the rows are in the order of `groups`; None = the same order.
        self.grouped_indices = None if indices == list(range(len(order))) else mx.array(indices)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append K and V (batch, heads, n, width) of the next tokens; return the tails' K and V."""
        self.offset = self.offset + keys.shape[2]
        return cast(tuple[mx.array, mx.array], self.tails.update_and_fetch(keys, values))

    def make_mask(self, N: int, return_array: bool = False, **more: Any) -> mx.array:
        """Return the mask of the tail's KV rows that each of the next `N` tokens may attend to."""
        if more.get("window_size") is not None:
            raise NotImplementedError("a window over rows that have a trunk")
        return cast(mx.array, self.tails.make_mask(N, return_array=return_array, **more))

    def filter(self, batch_indices: list[int]) -> None:
        """Keep these batch rows, in this order."""
        self.tails.filter(batch_indices)
        self.offset = self.offset[mx.array(batch_indices)]
        self.trunks = [self.trunks[number] for number in batch_indices]
        self._group_rows()

    def extend(self, other: "TrunkedKVCache") -> None:
        """Append the rows of another batch."""
        self.tails.extend(other.tails)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.trunks += other.trunks
        self._group_rows()

    def extract(self, idx: int) -> Any:
        """Return a row in a cache of its own: a TailKVCache if it has a trunk, or upstream's."""
        tail, trunk = self.tails.extract(idx), self.trunks[idx]
        return tail if trunk is None else TailKVCache(tail, trunk)

    def without_trunks(self) -> Any:
        """Return upstream's batch cache. It holds all KV once no row has a trunk."""
        assert not self.groups, "some rows still have a trunk"
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
        """The bytes of the tails. Trunks are counted apart, as several batches may share one."""
        return int(self.tails.nbytes)


def can_stand_on_trunk(layer: Any) -> bool:
    """Whether a sequence's layer keeps plain KV rows, so that a trunk may hold the first ones."""
    return isinstance(layer, TailKVCache) or type(layer).__name__ == PLAIN


def merge_on_trunks(
    caches: Sequence[Any], trunks: Sequence[Trunk | None], number: int
) -> TrunkedKVCache:
    """Return layer `number` of a batch of these caches, each on its trunk, if any.

    A trunk that lacks this layer gets it from the first cache on that trunk.
    """
    tails: list[Any] = []
    layers: list[LayerTrunk | None] = []
    for cache, trunk in zip(caches, trunks, strict=True):
        if trunk is None:
            assert not isinstance(cache, TailKVCache), "a cache still has a trunk: see `whole`"
            tails.append(cache)
            layers.append(None)
            continue
        assert trunk.length < cache.offset, (trunk.length, cache.offset)
        if number not in trunk.layers:
            trunk.layers[number] = LayerTrunk(*_copied_kv(cache, 0, trunk.length))
        layer = trunk.layers[number]
        if isinstance(cache, TailKVCache) and cache.trunk is layer:
            tails.append(cache.tail)
        else:
            like = cache.tail if isinstance(cache, TailKVCache) else cache
            tails.append(_single_cache(like, *_copied_kv(cache, trunk.length, int(cache.offset))))
        layers.append(layer)
    return TrunkedKVCache(tails[0].merge(tails), layers)


def copy_trunk_rows(cache: list[Any]) -> None:
    """Copy the trunk's KV rows into a sequence's own cache, one layer after another."""
    for number, layer in enumerate(cache):
        if isinstance(layer, TailKVCache):
            cache[number] = layer.whole()


def _copied_kv(cache: Any, start: int, end: int) -> tuple[mx.array, mx.array]:
    """Return copies of K and V of the tokens [start, end) of one sequence, evaluated."""
    parts: list[tuple[Any, int]] = [(cache, 0)]  # with each part's first position
    if isinstance(cache, TailKVCache):
        parts = [(cache.trunk, 0), (cache.tail, cache.trunk.length)]
    copies = []
    for name in ("keys", "values"):
        rows = [
            getattr(part, name)[..., max(0, start - first) : max(0, end - first), :]
            for part, first in parts
        ]
        copies.append(mx.contiguous(mx.concatenate(rows, axis=2)))
    mx.eval(copies)
    return copies[0], copies[1]


def _single_cache(like: Any, keys: mx.array, values: mx.array) -> Any:
    """Return a cache of one sequence that holds this KV, of the class of `like`."""
    single = type(like)()
    single.keys, single.values, single.offset = keys, values, keys.shape[2]
    return single
