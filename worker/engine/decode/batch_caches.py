"""Merges the caches of several sequences, so that they share a forward, and takes one out again.

Mlx-lm and mlx-vlm have batch caches for the layers that they make, but mlx-lm has none for rows
that are packed while they run. Whether a model computes in them what it computes alone is tried.
Owner: the inference thread.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask
from numpy.typing import NDArray

from hearth.worker.engine.decode.shared_trunk import PLAIN, TailKVCache

log = logging.getLogger(__name__)

STEP: Final = 256  # rows by which buffers grow, as mlx-lm's
PACKED: Final = "QuantizedKVCache"  # mlx-lm's and mlx-vlm's are alike

# Errors are 1 less the correlation of logits. A batch rounds anew, and so does a sequence alone
# that is cut otherwise: the one may err by some of what the other does. In fp32 that is nothing.
# A position that is off by one errs by 3e-4 or more, padding that is not masked by 5e-3 or more,
# so no more than half of that is ever taken for rounding. The routers of a model with experts may
# choose others where two are nearly tied, which no text has always: hence several texts.
ERROR_MAX: Final = 1e-4
CUT_ERRORS_MAX: Final = 10
CUT_ERROR_MAX: Final = 2e-4  # what is counted of it
TEXTS: Final = 3
LENGTHS: Final = (3, 64)  # of the two rows: most of the first is padding
SHIFTS: Final = (40, 0, 7)  # of rows' positions, as behind images
STEPS: Final = 2

Call = Callable[..., mx.array]
# How unlike logits are to those alone (not a number where any of them is): in a batch, or in one
# forward of several tokens; and alone too, but cut otherwise, computed where that decides.
Unlike = tuple[float, Callable[[], float]]


class BatchQuantizedKVCache:
    """The packed K and V of several sequences in one layer, each padded on its left.

    Does for QuantizedKVCache what mlx-lm's BatchKVCache does for KVCache, under the same names.
    `keys` and `values` are (packed, scales, biases), each (batch, heads, rows, width). Of the rows
    `_idx` are written, and a sequence's own are those from its `_padding` on. (Not `left_padding`:
    mlx-vlm's Qwen3.5 takes a cache with that for raw rows, and would mask none of these.)
    Owner: the inference thread.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        """Copy the lone caches `rows`, none of them empty."""
        first = rows[0]
        self.bits, self.group_size = first.bits, first.group_size  # what attention asks for
        self._lone = type(first)
        lengths: list[int] = [row.offset for row in rows]
        assert min(lengths) > 0, lengths
        self._idx = max(lengths)
        padding = [self._idx - length for length in lengths]
        self.keys = _stacked([row.keys for row in rows], lengths, self._idx)
        self.values = _stacked([row.values for row in rows], lengths, self._idx)
        self._padding = mx.array(padding)
        self.offset = mx.array(lengths)  # of each row, which its positions follow from

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the rows (batch, heads, n, width) of the next tokens; return all, packed."""
        start, self._idx = self._idx, self._idx + keys.shape[2]
        if self._idx > self.keys[0].shape[2]:
            spare = -(-(self._idx - start) // STEP) * STEP
            self.keys, self.values = (
                tuple(_padded(array, 0, spare) for array in arrays)
                for arrays in (self.keys, self.values)
            )
        self.offset = self.offset + keys.shape[2]
        for buffers, new in ((self.keys, keys), (self.values, values)):
            packed = mx.quantize(new, group_size=self.group_size, bits=self.bits)
            for buffer, array in zip(buffers, packed, strict=True):
                buffer[..., start : self._idx, :] = array
        return self._written(self.keys), self._written(self.values)

    def make_mask(self, N: int, return_array: bool = False, **more: Any) -> mx.array:
        """Return which rows each of the next `N` tokens may see: none of the padding."""
        mask: mx.array = create_causal_mask(N, offset=self._idx, left_padding=self._padding, **more)
        return mask

    def filter(self, batch_indices: list[int] | mx.array) -> None:
        """Keep these sequences, in this order, and no more padding than they need."""
        kept = mx.array(batch_indices)
        self.offset, self._padding = self.offset[kept], self._padding[kept]
        least: int = self._padding.min().item()  # type: ignore[assignment]
        self.keys, self.values = (
            tuple(array[kept][..., least:, :] for array in arrays)
            for arrays in (self.keys, self.values)
        )
        self._padding = self._padding - least
        self._idx -= least

    def extend(self, other: "BatchQuantizedKVCache") -> None:
        """Take in the sequences of another batch, behind those here."""
        end = max(self._idx, other._idx)
        pair = (self, other)
        rows = max(end - one._idx + one.keys[0].shape[2] for one in pair)

        def joined(ours: Any, theirs: Any) -> mx.array:
            parts = []
            for one, array in zip(pair, (ours, theirs), strict=True):
                left = end - one._idx
                parts.append(_padded(array, left, rows - left - array.shape[2]))
            return mx.concatenate(parts)

        self.keys = tuple(map(joined, self.keys, other.keys))
        self.values = tuple(map(joined, self.values, other.values))
        self._padding = mx.concatenate([one._padding + (end - one._idx) for one in pair])
        self.offset = mx.concatenate([self.offset, other.offset])
        self._idx = end

    def extract(self, idx: int) -> Any:
        """Return a sequence in a cache of its own, of the class that it came in."""
        lone = self._lone(group_size=self.group_size, bits=self.bits)
        start: int = self._padding[idx].item()  # type: ignore[assignment]
        lone.keys, lone.values = (
            tuple(mx.contiguous(a[idx : idx + 1, :, start : self._idx]) for a in arrays)
            for arrays in (self.keys, self.values)
        )
        lone.offset = self._idx - start
        return lone

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return False

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset, self._padding

    @property
    def nbytes(self) -> int:
        return int(sum(array.nbytes for array in (*self.keys, *self.values)))

    def _written(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        return tuple(array[..., : self._idx, :] for array in arrays)


def is_mergeable(cache: Sequence[Any]) -> bool:
    """Whether several caches like this one can become a batch."""
    return all(
        type(layer).__name__ == PACKED
        or (hasattr(layer, "merge") and is_mergeable(getattr(layer, "caches", ())))
        for layer in cache
    )


def batch_kind(cache: Sequence[Any]) -> Hashable:
    """Return what the caches of one batch have in common: whether and how each layer is packed."""
    lone = [layer.tail if isinstance(layer, TailKVCache) else layer for layer in cache]
    return tuple((type(layer).__name__, getattr(layer, "bits", None)) for layer in lone)


def keeps_plain_rows(kind: Hashable) -> bool:
    """Whether caches of this `batch_kind` have layers that can stand on a trunk."""
    return isinstance(kind, tuple) and any(name == PLAIN for name, _ in kind)


def merge_caches(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return a batch's layers, which hold copies of these caches' layers. Lazy.

    They have `extend`, `filter` and `extract`, and one `offset` for each row.
    """
    assert len({batch_kind(row) for row in rows}) == 1, "packed rows and others share no batch"
    return [
        BatchQuantizedKVCache(layers)
        if type(layers[0]).__name__ == PACKED
        else layers[0].merge(list(layers))
        for layers in zip(*rows, strict=True)
    ]


def take_row(layer: Any, number: int) -> Any:
    """Return a batch layer's row in a cache of its own, evaluated; it keeps no other alive."""
    lone = layer.extract(number)
    for part in getattr(lone, "caches", (lone,)):
        if hasattr(part, "cache"):  # states: upstream gives a view of those of all rows
            part.cache = [None if state is None else mx.contiguous(state) for state in part.cache]
    mx.eval(lone.state)
    return lone


def batches_like_alone(model: Call, new_cache: Callable[[], list[Any]]) -> bool:
    """Whether a batch gives each row the logits that it gets alone. Tries it; warns where not.

    Takes eight forwards of at most 64 tokens; up to three times as many, and one of 66 for each,
    where the first fails.
    """
    reason = why_not_alike(lambda text: _errors(model, new_cache, text))
    if reason is not None:
        log.warning("sequences decode in turns, as they cannot share a forward: %s", reason)
    return reason is None


def why_not_alike(errors_of: Callable[[int], Unlike]) -> str | None:
    """Return why a batch does not compute what its rows compute alone; None where it does.

    `errors_of` computes one of `TEXTS`.
    """
    reason = ""
    try:
        for text in range(TEXTS):
            together, cut_otherwise = errors_of(text)
            if together <= ERROR_MAX:
                return None
            of_cut = cut_otherwise()
            if together <= ERROR_MAX + CUT_ERRORS_MAX * min(of_cut, CUT_ERROR_MAX):
                return None
            reason = f"its logits are off by {together:.1e}, by {of_cut:.1e} cut otherwise"
    except Exception as error:  # whatever an architecture raises on what it was not made for
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    return reason


def _errors(model: Call, new_cache: Callable[[], list[Any]], text: int) -> Unlike:
    prompts = [[7 + 11 * text + (5 + 3 * n) * n % 97 for n in range(count)] for count in LENGTHS]
    return unlike(model, new_cache, text, prompts, merge_caches)


def unlike(
    model: Call,
    new_cache: Callable[[], list[Any]],
    text: int,
    prompts: Sequence[list[int]],
    merge: Callable[[list[list[Any]]], list[Any]],
) -> Unlike:
    """Feed tokens behind prompts, of which the second is the longest, in a batch and alone."""
    answers = [
        [13 + 18 * row + text * (17 - 10 * row) + n * (1 + row) for row in range(len(prompts))]
        for n in range(STEPS)
    ]
    caches = [filled_cache(model, new_cache, prompt) for prompt in prompts]
    batch = merge(caches)
    # Models of text alone take no such argument.
    shifts = SHIFTS[: len(prompts)] if getattr(model, "takes_positions", False) else ()
    errors: list[float] = []
    for ids in answers:
        together = _logits(model, ids, batch, shifts)
        alone = [
            _logits(model, [id], cache, shifts[row : row + 1])[0]
            for row, (id, cache) in enumerate(zip(ids, caches, strict=True))
        ]
        errors += map(logits_error, together, alone)
    whole = [*prompts[1], *(ids[1] for ids in answers)]
    return float(np.max(errors)), lambda: cut_error(model, new_cache, whole, alone[1])


def cut_error(
    model: Call, new_cache: Callable[[], list[Any]], whole: list[int], alone: NDArray[Any]
) -> float:
    """Return how unlike the last token's logits are in a forward of a whole text."""
    return logits_error(as_floats(model(mx.array([whole]), cache=new_cache())[0, -1]), alone)


def _logits(model: Call, ids: list[int], cache: list[Any], shifts: Sequence[int]) -> NDArray[Any]:
    """Return the logits (rows, vocabulary) behind one more token for each row."""
    arguments = {"shift": list(shifts)} if shifts else {}
    logits = model(mx.array(ids)[:, None], cache=cache, **arguments)[:, -1]
    return as_floats(logits)


def filled_cache(model: Call, new_cache: Callable[[], list[Any]], prompt: list[int]) -> list[Any]:
    """Return a cache that holds a prompt, evaluated."""
    cache = new_cache()
    model(mx.array([prompt]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def as_floats(logits: mx.array) -> NDArray[Any]:
    """Return logits as numbers whose errors are not of their type."""
    return np.array(logits.astype(mx.float32)).astype(np.float64)


def logits_error(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return how unlike logits are: 0 where equal. Not a number where any of them is."""
    return 1 - float(np.corrcoef(one, other)[0, 1])


def _stacked(
    rows: Sequence[Sequence[mx.array]], lengths: Sequence[int], end: int
) -> tuple[mx.array, ...]:
    """Return for each of the arrays of packed rows those of all sequences, ending alike."""
    return tuple(
        mx.concatenate(
            [
                _padded(array[..., :length, :], end - length, 0)
                for array, length in zip(arrays, lengths, strict=True)
            ]
        )
        for arrays in zip(*rows, strict=True)
    )


def _padded(array: mx.array, left: int, right: int) -> mx.array:
    """Return (batch, heads, rows, width) with so many more rows, of zeros."""
    return mx.pad(array, [(0, 0), (0, 0), (left, right), (0, 0)]) if left or right else array
