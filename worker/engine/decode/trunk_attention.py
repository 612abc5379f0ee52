"""Attends a trunk that several rows share once for all of them, and each row's tail beside it.

MLX's fused attention returns no log-sum-exp (ml-explore/mlx #2590), by which two parts of a softmax
are joined, and upstream's models ask no cache how it is attended: they call a function under a name
in their module. That name is replaced, in this file only.
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
# Attends a layer that has trunks, given upstream's function and its arguments by their names.
AttendTrunks = Callable[[Attention, dict[str, Any]], mx.array]


def reach_trunks(
    network: nn.Module, attend: AttendTrunks = lambda _stock, given: attend_with_trunks(**given)
) -> Callable[[], None]:
    """Have the modules of this network attend trunks; return what takes that back.

    Caches without a trunk are attended as before. A module that attends by other means is not
    reached: whether all are is to be tried.
    """
    replaced: list[tuple[Any, Attention]] = []
    files = {type(part).__module__ for _, part in network.named_modules()}
    # Of what upstream runs of a checkpoint's own code there is no module.
    for module in [sys.modules[name] for name in sorted(files) if name in sys.modules]:
        now: Any = getattr(module, NAME, None)
        stock = getattr(now, "stock", now)  # another network of these modules may have come first
        if stock is not None and _takes_cache(stock):
            setattr(module, NAME, _with_trunks(stock, attend))
            replaced.append((module, now))

    def take_back() -> None:
        for module, before in replaced:
            setattr(module, NAME, before)

    return take_back


def _takes_cache(stock: Attention) -> bool:
    """Whether a function is given the layer's cache; MLX's own, which some import, is not."""
    try:
        return "cache" in inspect.signature(stock).parameters
    except ValueError:  # of a builtin
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
    """Return the attention (rows, heads, n, width) over each row's trunk and its tail.

    `keys` and `values` (rows, KV heads, tokens, width) are the tails, which `mask` is for. Scores
    are products in the dtype of the keys, as in MLX's own unfused attention; everything from the
    softmax to the join is float32.
    """
    if mask is not None and (isinstance(mask, str) or mask.dtype != mx.bool_):
        raise NotImplementedError("a mask that says more than which rows are seen")
    rows, heads, count, _ = queries.shape
    kv_heads = keys.shape[1]
    repeats = heads // kv_heads
    # Query heads that share K and V become rows of one product.
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
    """Return the attention over each row's trunk, and its log-sum-exp: -inf where it has none."""
    if len(cache.groups) == 1 and not cache.without:
        return _attend_trunk(grouped, cache.groups[0][0])
    parts = [_attend_trunk(grouped[rows], trunk) for trunk, rows in cache.groups]
    if cache.without:
        nothing = slice(0, cache.without)
        parts.append((mx.zeros_like(own[nothing]), mx.full(own_lse[nothing].shape, -mx.inf)))
    out, lse = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
    return (out, lse) if cache.places is None else (out[cache.places], lse[cache.places])


def _attend_trunk(grouped: mx.array, trunk: LayerTrunk) -> tuple[mx.array, mx.array]:
    """Attend (rows, KV heads, n, width) to one trunk, whose rows are read once for all."""
    rows, kv_heads, count, width = grouped.shape
    together = grouped.transpose(1, 0, 2, 3).reshape(1, kv_heads, rows * count, width)
    return tuple(  # type: ignore[return-value]
        each.reshape(kv_heads, rows, count, -1).transpose(1, 0, 2, 3)
        for each in _attend(together, trunk.keys, trunk.values, None)
    )


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Return the attention of scaled queries, and the log-sum-exp of its scores: float32."""
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - highest)  # once: exponentials take most of the time on a CPU
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / total).astype(values.dtype)  # before the product: float16 ends at 65,504
    return (weights @ values).astype(mx.float32), highest + mx.log(total)
