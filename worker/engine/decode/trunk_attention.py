"""Computes attention over a shared trunk once for all its batch rows, and over each row's tail.

The two parts of a softmax are joined by their log-sum-exp, which MLX's fused attention does not
return (ml-explore/mlx #2590). Upstream's models do not let the cache choose the attention: they
call a function by its name in their module. This file replaces that name; no other file does.
Owner: the inference thread.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from hearth.worker.engine.decode.shared_trunk import LayerTrunk, TrunkedKVCache

NAME: Final = "scaled_dot_product_attention"

Attention = Callable[..., mx.array]
# (upstream's function, its arguments by name) -> the attention of a layer with trunks
AttendTrunks = Callable[[Attention, dict[str, Any]], mx.array]


def reach_trunks(
    network: nn.Module, attend: AttendTrunks = lambda _stock, given: attend_with_trunks(**given)
) -> Callable[[], None]:
    """Make the modules of this network attend to trunks; return a function that undoes this.

    Attention over caches without a trunk stays as it was. A module that does not call upstream's
    function is not reached; `trunks_like_alone` tries whether all are reached.
    """
    replaced: list[tuple[Any, Attention]] = []
    files = {type(part).__module__ for _, part in network.named_modules()}
    # Code that came with a checkpoint has no entry in sys.modules.
    for module in [sys.modules[name] for name in sorted(files) if name in sys.modules]:
        present: Any = getattr(module, NAME, None)
        stock = getattr(present, "stock", present)  # replaced already for another network
        if stock is not None and _takes_cache(stock):
            setattr(module, NAME, _with_trunks(stock, attend))
            replaced.append((module, present))

    def restore() -> None:
        for module, before in replaced:
            setattr(module, NAME, before)

    return restore


def _takes_cache(stock: Attention) -> bool:
    """Whether a function takes the layer's cache. MLX's own, which some models call, does not."""
    try:
        return "cache" in inspect.signature(stock).parameters
    except ValueError:  # a builtin has no signature
        return False


def _with_trunks(stock: Attention, attend: AttendTrunks) -> Attention:
    signature = inspect.signature(stock)

    def attention(*args: Any, **named: Any) -> mx.array:
        given = signature.bind(*args, **named).arguments
        if not isinstance(given.get("cache"), TrunkedKVCache):
            return stock(*args, **named)
        return attend(stock, given)

    attention.stock = stock  # type: ignore[attr-defined]
    return attention


def attend_with_trunks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: TrunkedKVCache,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return the attention (batch rows, heads, n, width) over each row's trunk and tail.

    `keys` and `values` (batch rows, KV heads, tokens, width) are the tails, and `mask` is for them.
    Scores are products in the dtype of the keys, as in MLX's own unfused attention. Everything from
    the softmax to the join is float32.
    """
    if mask is not None and (isinstance(mask, str) or mask.dtype != mx.bool_):
        raise NotImplementedError("a mask that says more than which rows are seen")
    rows, heads, count, _ = queries.shape
    kv_heads = keys.shape[1]
    repeats = heads // kv_heads
    # Query heads that share K and V become rows of one matrix product.
    grouped = (queries * scale).reshape(rows, kv_heads, repeats * count, -1)
    if mask is not None and count > 1:
        mask = mx.tile(mx.broadcast_to(mask, (rows, 1, *mask.shape[-2:])), (1, 1, repeats, 1))
    own, own_lse = _attend(grouped, keys, values, mask)
    shared, shared_lse = _attend_trunks(grouped, cache, own, own_lse)
    parts = [own_lse, shared_lse]
    if sinks is not None:
        sink = mx.repeat(sinks.astype(mx.float32).reshape(kv_heads, repeats), count, axis=1)
        parts.append(mx.broadcast_to(sink[None, ..., None], own_lse.shape))
    whole_lse = mx.logsumexp(mx.stack(parts), axis=0)
    joined = mx.exp(own_lse - whole_lse) * own + mx.exp(shared_lse - whole_lse) * shared
    return joined.astype(queries.dtype).reshape(rows, heads, count, -1)


def _attend_trunks(
    grouped: mx.array, cache: TrunkedKVCache, own: mx.array, own_lse: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the attention over each row's trunk, and its log-sum-exp: -inf without a trunk."""
    if len(cache.groups) == 1 and not cache.rows_without_trunk:
        return _attend_trunk(grouped, cache.groups[0][0])
    parts = [_attend_trunk(grouped[rows], trunk) for trunk, rows in cache.groups]
    if cache.rows_without_trunk:
        rest = slice(0, cache.rows_without_trunk)
        parts.append((mx.zeros_like(own[rest]), mx.full(own_lse[rest].shape, -mx.inf)))
    out, lse = (mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
    return (
        (out, lse)
        if cache.grouped_indices is None
        else (out[cache.grouped_indices], lse[cache.grouped_indices])
    )


def _attend_trunk(grouped: mx.array, trunk: LayerTrunk) -> tuple[mx.array, mx.array]:
    """Attend queries (batch rows, KV heads, n, width) to one trunk, which is read once for all."""
    rows, kv_heads, count, width = grouped.shape
    together = grouped.transpose(1, 0, 2, 3).reshape(1, kv_heads, rows * count, width)
    return tuple(  # type: ignore[return-value]
        array.reshape(kv_heads, rows, count, -1).transpose(1, 0, 2, 3)
        for array in _attend(together, trunk.keys, trunk.values, None)
    )


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return the attention of scaled queries, and the log-sum-exp of the scores. Both float32."""
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - highest)  # only once: exponentials take most of the time on a CPU
    total = weights.sum(axis=-1, keepdims=True)
    # Divide before the product, which could otherwise leave float16's range (65,504).
    weights = (weights / total).astype(values.dtype)
    return (weights @ values).astype(mx.float32), highest + mx.log(total)
