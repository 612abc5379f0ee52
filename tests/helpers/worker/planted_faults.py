"""Plants faults of the kinds that checks are for, in the real path of a test's process.

None of them shows in an assertion of the code that it is planted in: only the answers are wrong.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from hearth.worker.cache.prefix_search import ResumePlan
from hearth.worker.doctor import check_answers
from hearth.worker.kv import serialise_kv
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import KVTransfer
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates

Plant = Callable[[pytest.MonkeyPatch], None]


def stale_state(patch: pytest.MonkeyPatch) -> None:
    """What is put back into a slot is that of an earlier place: states, windows, else rows."""
    put_state, put_window, put_rows = LayerMap.put_state, LayerMap.put_window, LayerMap.put_rows
    first: list[LayerStates] = []
    take = LayerMap.take_state

    def take_state(self: LayerMap, cache: list[Any]) -> LayerStates:
        state = take(self, cache)
        first.append(state)
        return state

    def put_old(self: LayerMap, cache: list[Any], state: LayerStates, position: int) -> None:
        put_state(self, cache, first[0], position)

    def put_old_window(self: LayerMap, cache: list[Any], runs: Any, position: int) -> None:
        put_window(self, cache, [_one_late(run) for run in runs], position)

    def put_old_rows(self: LayerMap, cache: list[Any], runs: Any, position: int, rows: int) -> None:
        layout = self.layout
        stale = runs if layout.has_state or layout.window else [_one_late(run) for run in runs]
        put_rows(self, cache, stale, position, rows)

    patch.setattr(LayerMap, "take_state", take_state)
    patch.setattr(LayerMap, "put_state", put_old)
    patch.setattr(LayerMap, "put_window", put_old_window)
    patch.setattr(LayerMap, "put_rows", put_old_rows)


def stale_rewind(patch: pytest.MonkeyPatch) -> None:
    """Only a slot that is taken back in place has an older state, window, or one row too few."""
    rewind = KVTransfer.rewind

    def stale(self: KVTransfer, slot: Any, plan: Any) -> None:
        before = plan.position < slot.position
        rewind(self, slot, plan)
        for leaf in leaves(slot.cache) if before else ():
            if getattr(leaf, "keys", None) is not None:
                leaf.keys = mx.concatenate([leaf.keys[:, :, :1], leaf.keys[:, :, :-1]], axis=2)
            elif hasattr(leaf, "cache"):
                leaf.cache = [None if a is None else a * 0.5 for a in leaf.cache]

    patch.setattr(KVTransfer, "rewind", stale)


def wrong_positions(patch: pytest.MonkeyPatch) -> None:
    """Behind a restore, all that is read gets the position one too far."""
    restore, rope = KVTransfer.restore, mx.fast.rope
    is_behind: list[bool] = []

    def restored(self: KVTransfer, slot: Any, plan: Any, rows: int) -> None:
        restore(self, slot, plan, rows)
        is_behind.extend([True] * (plan.position > 0))

    def shifted(*args: Any, offset: Any = 0, **more: Any) -> mx.array:
        return rope(*args, offset=offset + bool(is_behind), **more)

    patch.setattr(KVTransfer, "restore", restored)
    patch.setattr(mx.fast, "rope", shifted)


def offset_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A restored layer believes to hold one token more."""
    put_rows, put_window = LayerMap.put_rows, LayerMap.put_window

    def one_more(self: LayerMap, cache: list[Any], *args: Any) -> None:
        put_rows(self, cache, *args)
        for leaf in leaves(cache):
            if hasattr(leaf, "offset") and not hasattr(leaf, "max_size"):
                leaf.offset += 1

    def one_more_window(self: LayerMap, cache: list[Any], *args: Any) -> None:
        put_window(self, cache, *args)
        for leaf in leaves(cache):
            if hasattr(leaf, "max_size"):
                leaf.offset += 1

    patch.setattr(LayerMap, "put_rows", one_more)
    patch.setattr(LayerMap, "put_window", one_more_window)


def bytes_lost_in_files(patch: pytest.MonkeyPatch) -> None:
    """What goes into a file is rounded."""

    def rounded(kept: Any) -> Any:
        if isinstance(kept, KVRows):
            coarse = (
                tuple(a.astype(mx.bfloat16).astype(a.dtype) for a in rows.arrays)
                for rows in kept.layers
            )
            kept = KVRows(tuple(map(LayerRows, coarse)))
        return serialise_kv.arrays_of(kept)

    patch.setattr(check_answers, "arrays_of", rounded)


def nothing_is_reused(patch: pytest.MonkeyPatch) -> None:
    """Every prompt is read from its beginning: right answers, for the wrong price."""
    patch.setattr(KVManager, "plan", lambda self, query: ResumePlan.cold())


class RowDependentModel(nn.Module):
    """A model whose logits depend on how many rows share a forward."""

    def __init__(self, model: Any, error: float, rows_min: int = 2) -> None:
        super().__init__()
        self.inner = model
        self._error = error
        self._rows_min = rows_min

    def make_cache(self) -> list[Any]:
        return list(make_prompt_cache(self.inner))

    def __call__(self, ids: mx.array, cache: Any = None, **more: Any) -> mx.array:
        logits = self.inner(ids, cache=cache, **more)
        if ids.shape[0] < self._rows_min:
            return logits
        waves = mx.sin(mx.arange(logits.shape[-1]).astype(mx.float32))
        return logits + (self._error * waves).astype(logits.dtype)


class DraftDependentModel(RowDependentModel):
    """A model whose logits are others where few tokens, but several, share a forward.

    `error` is added to them, or the likeliest token is the one behind it where it is None.
    """

    def __init__(self, model: Any, error: float | None = None) -> None:
        super().__init__(model, error or 0, rows_min=1)
        self._is_shifted = error is None

    def __call__(self, ids: mx.array, cache: Any = None, **more: Any) -> mx.array:
        if not 2 <= ids.shape[1] <= 8:
            logits: mx.array = self.inner(ids, cache=cache, **more)
            return logits
        logits = super().__call__(ids, cache=cache, **more)
        behind = mx.concatenate([logits[..., -1:], logits[..., :-1]], axis=-1)
        return behind if self._is_shifted else logits


class UnknownCacheModel(RowDependentModel):
    """A model whose layers keep what nothing here knows how to take back."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, 0)

    def make_cache(self) -> list[Any]:
        return [OddCache() for _ in super().make_cache()]


class OddCache(KVCache):
    """Is known by no name."""


class ForgetfulDecoding(RowDependentModel):
    """A model for which a token that is fed alone is another one: decoding writes other KV."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, 0)

    def __call__(self, ids: mx.array, cache: Any = None, **more: Any) -> mx.array:
        fed = mx.full(ids.shape, 400, dtype=ids.dtype) if ids.shape[1] == 1 else ids
        logits: mx.array = self.inner(fed, cache=cache, **more)
        return logits


def leaves(cache: list[Any]) -> list[Any]:
    found = []
    for layer in cache:
        found += leaves(list(layer.caches)) if hasattr(layer, "caches") else [layer]
    return found


def _one_late(run: Any) -> Any:
    """Return rows each of which is that of the token before: the last token's are lost."""
    return tuple(
        LayerRows(
            tuple(mx.concatenate([a[..., :1, :], a[..., :-1, :]], axis=2) for a in rows.arrays),
            rows.format,
        )
        for rows in run
    )
