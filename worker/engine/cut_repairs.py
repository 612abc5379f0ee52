"""Repairs the models of mlx-vlm whose logits depend on where a prompt is cut into forwards.

The cache resumes a prompt at its cuts, so the logits must not depend on them. Each repair follows
the makers' published code and changes the loaded network alone, not upstream's classes. Private
names of upstream are used where it has no public ones. For each repair there is a test in
`tests/unit/worker/engine/test_cut_repairs.py` that fails once upstream is mended.

Owner: the inference thread.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_vlm.models.cache import BatchPoolingCache, PoolingCache, RotatingKVCache
from mlx_vlm.models.deepseek_v4.language import Indexer, LanguageModel
from mlx_vlm.models.deepseek_v32 import language as deepseek_v32
from mlx_vlm.models.hunyuan_vl.language import LanguageModel as HunyuanLanguageModel
from mlx_vlm.models.hy_v4.indexer import HyV4Indexer
from mlx_vlm.models.mllama.language import MllamaCrossAttentionDecoderLayer

OVERLAPPED_RATIO: Final = 4  # DeepSeek V4 lets blocks of so many tokens overlap, and no others
SCORES_MAX: Final = 1 << 26  # scores of 4 bytes that a choice of pooled rows has at a time
# What stands for the block before the first one, by the attribute: its weights are exactly 0.
_NO_BLOCK: Final = {"previous_kv": 0.0, "previous_gate": -math.inf}


def repair_cuts(network: Any) -> None:
    """Repair those parts of a network of mlx-vlm whose results depend on cuts."""
    for module in network.modules():
        if type(module) is LanguageModel:
            _make_overlapped_caches(module)
        module.__class__ = REPAIRED.get(type(module), type(module))


def _make_overlapped_caches(language_model: Any) -> None:
    """Have a DeepSeek V4 make caches that keep the last block between forwards.

    Where blocks overlap, a pooled row is made of a block and of the block before. The makers' code
    keeps that block; upstream's compressor begins each forward without one.
    Source: `Compressor.forward` in the inference code of DeepSeek-V4 (`kv_state[:, :ratio]`), and
    `update_overlap_state` in transformers.
    """
    make_cache = language_model.make_cache

    def make_overlapped() -> list[Any]:
        caches: list[Any] = make_cache()
        for part in (part for layer in caches for part in getattr(layer, "caches", (layer,))):
            if type(part) is PoolingCache and part.ratio == OVERLAPPED_RATIO:
                part.__class__ = OverlappedPoolingCache
            elif type(part) is RotatingKVCache:
                part.__class__ = OrderedRotatingKVCache
        return caches

    language_model.make_cache = make_overlapped


class _KeepsLastBlock:
    """Leads the whole blocks of a forward with the last block of the forwards before.

    The compressor then makes a row of each of these blocks. The first of the rows is dropped: the
    cache has it already, and it is made without the block before it.
    """

    # The last whole block (batch, ratio, width), as it was in buf_kv and buf_gate; None before the
    # first. The arrays are replaced and never written to.
    previous_kv: mx.array | None = None
    previous_gate: mx.array | None = None

    def update_and_fetch(self, rows: mx.array) -> mx.array:
        """Add the pooled rows (batch, blocks, width) of the blocks behind the first; return all."""
        pooled: mx.array = super().update_and_fetch(rows[:, 1:])  # type: ignore[misc]
        return pooled

    @property
    def state(self) -> tuple[mx.array | None, ...]:
        return (*super().state, self.previous_kv, self.previous_gate)  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        previous = (self.previous_kv, self.previous_gate)
        own = sum(array.nbytes for array in previous if array is not None)
        return int(super().nbytes) + own  # type: ignore[misc]


class OrderedRotatingKVCache(RotatingKVCache):
    """A window that is attended to from the oldest token to the newest.

    Upstream computes forwards of up to eight tokens one by one, each in the order of the ring. That
    order, and with it the rounding of sums, would tell where the forwards before were cut.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found = super().update_and_fetch(keys, values)
        if self.offset < self.max_size:
            return found
        return self._temporal_order(self.keys), self._temporal_order(self.values)


class OverlappedPoolingCache(_KeepsLastBlock, PoolingCache):
    """The pooled rows of one sequence of a DeepSeek V4, with the last whole block."""

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: Any) -> tuple[Any, ...]:
        """Return kv and gate (batch, tokens, width) of whole blocks, and the first's position.

        Where there is a new block, the last one of the forwards before leads.
        """
        kv, gate, start = super().accumulate_windows(kv, gate, offset)
        return _led(self, kv, gate, start, [kv.shape[1]] * kv.shape[0])

    @classmethod
    def merge(cls, caches: Sequence[Any], prefix_lens: Any = None) -> "OverlappedBatchPoolingCache":
        return OverlappedBatchPoolingCache.merge(caches, prefix_lens)


class OverlappedBatchPoolingCache(_KeepsLastBlock, BatchPoolingCache):
    """The pooled rows of several sequences, with the last whole block of each."""

    def accumulate_windows(self, kv: mx.array, gate: mx.array, offset: Any) -> tuple[Any, ...]:
        """See `OverlappedPoolingCache`. Sequences with fewer new blocks are padded at the end."""
        kv, gate, start = super().accumulate_windows(kv, gate, offset)
        _, pending, rows, seen, _ = self.meta_state
        counts = zip(seen, pending, rows, strict=True)
        return _led(self, kv, gate, start, [s - p - r * self.ratio for s, p, r in counts])

    def filter(self, batch_indices: Any) -> None:
        super().filter(batch_indices)
        last = _last_blocks([self])
        self.__dict__.update({name: block[batch_indices] for name, block in last.items()})

    def extend(self, other: "OverlappedBatchPoolingCache") -> None:
        last = _last_blocks([self, other])
        super().extend(other)
        self.__dict__.update(last)

    def extract(self, idx: int) -> OverlappedPoolingCache:
        single: OverlappedPoolingCache = super().extract(idx)
        single.__class__ = OverlappedPoolingCache
        last = _last_blocks([self])
        single.__dict__.update(
            {name: mx.contiguous(block[idx : idx + 1]) for name, block in last.items()}
        )
        return single

    @classmethod
    def merge(cls, caches: Sequence[Any], prefix_lens: Any = None) -> "OverlappedBatchPoolingCache":
        batch: OverlappedBatchPoolingCache = super().merge(caches, prefix_lens)
        batch.__dict__.update(_last_blocks(caches))
        return batch


def _led(
    cache: Any, kv: mx.array, gate: mx.array, start: Any, counts: Sequence[int]
) -> tuple[mx.array, mx.array, Any]:
    """Return whole blocks behind the last block in `cache`, and keep the new last block there.

    `counts` are the tokens of each sequence in `kv` and `gate` (batch, tokens, width). `start` is
    the position of the first token, for all sequences or for each.
    """
    if kv.shape[1] == 0:
        return kv, gate, start
    newest = mx.array(list(counts))[:, None, None] + mx.arange(cache.ratio)[:, None]
    led = []
    for name, blocks in zip(_NO_BLOCK, (kv, gate), strict=True):
        led.append(mx.concatenate([_last_block(cache, name, blocks), blocks], axis=1))
        setattr(cache, name, mx.take_along_axis(led[-1], newest, axis=1))
    return led[0], led[1], start - cache.ratio


def _last_blocks(caches: Sequence[Any]) -> dict[str, mx.array]:
    """Return the last blocks of these caches, joined, by attribute; none if no cache has one."""
    like = next((cache for cache in caches if cache.previous_kv is not None), None)
    if like is None:
        return {}
    return {
        name: mx.concatenate([_last_block(c, name, getattr(like, name)) for c in caches])
        for name in _NO_BLOCK
    }


def _last_block(cache: Any, name: str, like: mx.array) -> mx.array:
    """Return the last block (batch, ratio, width) of a cache, or what stands for none."""
    last: mx.array | None = getattr(cache, name)
    if last is not None:
        return last
    shape = (cache.batch_size, cache.ratio, like.shape[-1])
    return mx.full(shape, _NO_BLOCK[name], like.dtype)


class _FlatIndexer(Indexer):
    """Chooses the pooled rows that the queries of a DeepSeek V4 read, among all rows.

    So does the makers' code. From 1,024 rows on, upstream chooses among the rows of the best 16
    blocks. Its blocks of 64 rows end where the forward ends: it never chooses the newest rows,
    which are in no whole block, and what an earlier query may choose depends on the cut.
    Source: `Indexer.forward` in the inference code of DeepSeek-V4.
    """

    def __call__(
        self, x: mx.array, q_residual: mx.array, position_rope: Any, pool_cache: Any, offset: Any
    ) -> mx.array | None:
        """Return the numbers of the chosen rows (batch, tokens, index_topk); None = read all."""
        pooled = self.compressor(x, pool_cache, offset)
        (batch, length, _), count = x.shape, pooled.shape[1]
        if count <= self.index_topk:
            return None
        queries = self.wq_b(q_residual).reshape(batch, length, self.n_heads, self.head_dim)
        queries = position_rope(queries.transpose(0, 2, 1, 3), offset).astype(mx.float32)
        keys = pooled.astype(mx.float32)[:, None].swapaxes(-1, -2)
        weights = self.weights_proj(x).astype(mx.float32).swapaxes(-1, -2)[..., None]
        mask = pool_cache.make_mask(length, offset)
        chosen, step = [], max(1, SCORES_MAX // (batch * self.n_heads * count))
        for begin in range(0, length, step):
            part = slice(begin, begin + step)
            # The makers scale the scores, too, which changes no order.
            scores = mx.maximum(queries[:, :, part] @ keys, 0) * weights[:, :, part]
            scores = scores.sum(axis=1)
            if mask is not None:
                scores = mx.where(mask[..., part, :], scores, mx.finfo(scores.dtype).min)
            best = mx.argpartition(-scores, kth=self.index_topk - 1, axis=-1)
            chosen.append(best[..., : self.index_topk])
        return mx.concatenate(chosen, axis=1)


class _ImageLayer(MllamaCrossAttentionDecoderLayer):
    """Is left out of a forward without an image, as in the makers' code.

    There upstream has each token attend to all tokens of its forward, also to later ones.
    Source: `MllamaTextModel.forward` in transformers. Upstream's caches keep nothing of an image.
    """

    def __call__(
        self, hidden: mx.array, cross_attention_states: mx.array | None, **arguments: Any
    ) -> mx.array:
        """Return the hidden states (batch, tokens, width) behind the layer."""
        if cross_attention_states is None:
            return hidden
        behind: mx.array = super().__call__(hidden, cross_attention_states, **arguments)
        return behind


class _NewPositions(HunyuanLanguageModel):
    """Makes the positions of each prompt anew.

    Upstream keeps those of the first prompt without images, and a longer one then fails.
    """

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._position_ids = None
        return super().__call__(*inputs, **named)


REPAIRED: Final[Mapping[type, type]] = {  # class of a network's part -> the class that it gets
    Indexer: _FlatIndexer,
    # The same forward, not compiled. Upstream compiles a HYV4's choice once for all shapes. Then
    # `argpartition` parts longer scores where it parted the first ones, counted from their
    # beginning. Metal sorts the scores, so that no place matters; a CPU does not.
    HyV4Indexer: deepseek_v32.Indexer,
    MllamaCrossAttentionDecoderLayer: _ImageLayer,
    HunyuanLanguageModel: _NewPositions,
}
