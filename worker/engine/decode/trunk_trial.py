"""Tries whether a model computes on a trunk what it computes alone, once rows would share one.

A model's last bits grow from layer to layer, so that logits cannot tell rounding from a fault where
numbers are coarse. Hence two comparisons. Each row's trunk and tail are joined and attended by
upstream's own function: logits must then be those alone, which proves positions, masks, and that
all layers are reached. Meanwhile each call is attended as it will be, and compared with that one.
Owner: the inference thread.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from hearth.worker.engine.decode.batch_caches import (
    STEPS,
    Call,
    Unlike,
    merge_caches,
    unlike,
    why_not_alike,
)
from hearth.worker.engine.decode.shared_trunk import (
    LayerTrunk,
    Trunk,
    TrunkedKVCache,
    can_stand_on_trunk,
    merge_on_trunks,
)
from hearth.worker.engine.decode.trunk_attention import Attention, attend_with_trunks, reach_trunks

log = logging.getLogger(__name__)

# The fewer tokens a row has, the more a fault of its trunk or position counts, and padding counts
# by its share of the row. In the models of the tests these few show what 40 and (3, 64) show:
# padding that is seen errs by 2.8e-3, a position off by one by 9e-4. With (3, 20) padding hides.
TRUNK_LENGTH: Final = 8  # of the rows that share one, before their own; a third row has none
TAILS: Final = (2, 28)  # their own
# Errors are the largest difference of a call's outputs, as a part of the largest output.
# In float32, on the CPU, whatever the model's numbers: only sums are in another order.
FLOAT32_ERROR_MAX: Final = 1e-4
# In the model's own numbers, on its device: so many units in the last place of the largest output,
# or what upstream's own attention errs by. GPUs may multiply float32 with ten bits: no less than
# `ROUNDING`.
UNITS_MAX: Final = 4
USUAL_ERRORS_MAX: Final = 2
ROUNDING: Final = 1e-3

Attend = Callable[..., mx.array]


def trunks_like_alone(
    model: Call,
    network: nn.Module,
    new_cache: Callable[[], list[Any]],
    attend: Attend = attend_with_trunks,
) -> bool:
    """Whether rows on one trunk get the logits that each gets alone. Tries it; tells where not.

    Takes eleven forwards of at most 36 tokens; up to three times as many, and one of 38 for each,
    where the first fails.
    """
    trial = _Trial(attend)
    take_back = reach_trunks(network, trial.attend)
    try:
        reason = why_not_alike(lambda text: _errors(model, new_cache, text, trial))
    finally:
        take_back()
    if reason is not None:
        log.info("each sequence of a batch keeps all of its KV, as none share a trunk: %s", reason)
    return reason is None


def _errors(model: Call, new_cache: Callable[[], list[Any]], text: int, trial: "_Trial") -> Unlike:
    trunk = [19 + 5 * text + (7 + 2 * n) * n % 89 for n in range(TRUNK_LENGTH)]
    tails = [[7 + 11 * text + (5 + 3 * n) * n % 97 for n in range(count)] for count in TAILS]
    prompts = [*(trunk + tail for tail in tails), tails[-1][: TAILS[0] + 1]]

    def merge(caches: list[list[Any]]) -> list[Any]:
        batch = _merged_on_trunk(caches)
        trial.expect(sum(isinstance(layer, TrunkedKVCache) for layer in batch) * STEPS)
        return batch

    found = unlike(model, new_cache, text, prompts, merge)
    trial.check()
    return found


def _merged_on_trunk(caches: list[list[Any]]) -> list[Any]:
    """Return a batch's layers in which all rows but the last share a trunk."""
    trunk = Trunk(TRUNK_LENGTH)
    trunks = [trunk] * (len(caches) - 1) + [None]
    return [
        merge_on_trunks(layers, trunks, number)
        if can_stand_on_trunk(layers[0])
        else merge_caches([[layer] for layer in layers])[0]
        for number, layers in enumerate(zip(*caches, strict=True))
    ]


class _Trial:
    """Attends layers that have trunks by upstream's function, and compares `attend` with it."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._expected = 0  # calls, at least: layers that share KV are attended each
        self._calls = 0
        self._errors: list[tuple[mx.array, mx.array]] = []  # of each call, and what it may be

    def expect(self, calls: int) -> None:
        """Begin anew: so many calls come."""
        self._expected, self._calls = calls, 0
        self._errors.clear()

    def attend(self, stock: Attention, given: dict[str, Any]) -> mx.array:
        self._calls += 1
        own = self._attend(**given)
        joined = join_trunks(given)
        usual = stock(**joined)
        with mx.stream(mx.cpu):
            exact = stock(**_in_float32(joined))
            largest = mx.abs(exact).max()

            def error(out: mx.array) -> mx.array:
                return mx.abs(out.astype(mx.float32) - exact).max() / largest

            exact_error = error(self._attend(**_in_float32(given)))
            unit = max(ROUNDING, UNITS_MAX * mx.finfo(usual.dtype).eps)
            self._errors += [
                (exact_error, mx.array(FLOAT32_ERROR_MAX)),
                (error(own), unit + USUAL_ERRORS_MAX * error(usual)),
            ]
        return usual

    def check(self) -> None:
        """Raise where attention was not seen, or not alike, however alike the logits are."""
        if self._calls < self._expected:
            raise ValueError(
                f"it attends {self._calls} of {self._expected} times where that is seen"
            )
        for error, most in [(float(error), float(most)) for error, most in self._errors]:
            if not error <= most:  # also where it is not a number
                raise ValueError(f"attention on a trunk is off by {error:.1e}, of {most:.1e}")


def join_trunks(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of upstream's attention for rows that hold their trunks themselves.

    `cache` is the tails' then, which no attention but of packed rows asks for anything.
    """
    cache, mask = given["cache"], given["mask"]
    rows, _, count, _ = given["queries"].shape
    length = max((trunk.length for trunk in cache.trunks if trunk is not None), default=0)
    lengths = mx.array([trunk.length if trunk is not None else 0 for trunk in cache.trunks])
    seen = mx.arange(length) >= length - lengths[:, None]
    own = given["keys"].shape[2]
    masks = [
        mx.broadcast_to(seen[:, None, None], (rows, 1, count, length)),
        mx.broadcast_to(mx.array(True) if mask is None else mask, (rows, 1, count, own)),
    ]
    joined = {"cache": cache.tails, "mask": mx.concatenate(masks, axis=-1)}
    for name in ("keys", "values"):
        tails = given[name]
        trunks = mx.concatenate([_padded(trunk, name, tails, length) for trunk in cache.trunks])
        joined[name] = mx.concatenate([trunks, tails], axis=2)
    return given | joined


def _padded(trunk: Any, name: str, tails: mx.array, length: int) -> mx.array:
    """Return a trunk's K or V (1, KV heads, length, width), which ends with it."""
    if trunk is None:
        return mx.zeros((1, tails.shape[1], length, tails.shape[3]), tails.dtype)
    rows: mx.array = getattr(trunk, name)
    return mx.pad(rows, [(0, 0), (0, 0), (length - rows.shape[2], 0), (0, 0)])


def _in_float32(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with all numbers in float32, those of the trunks too."""
    wide: dict[str, Any] = {
        name: value.astype(mx.float32)
        for name, value in given.items()
        if isinstance(value, mx.array) and value.dtype != mx.bool_
    }
    cache = given["cache"]
    if isinstance(cache, TrunkedKVCache):
        trunks = {
            trunk: LayerTrunk(trunk.keys.astype(mx.float32), trunk.values.astype(mx.float32))
            for trunk, _ in cache.groups
        }
        wide["cache"] = TrunkedKVCache(
            cache.tails, [trunk and trunks[trunk] for trunk in cache.trunks]
        )
    return given | wide
