"""Decodes several sequences in one forward, over the batch caches of mlx-lm and our own.

Mlx-lm and mlx-vlm have batch caches for the layers that they make, but mlx-lm has none for rows
that are packed while they run. Whether a model computes in a batch what it computes alone is tried.
Owner: the inference thread.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from hearth.worker.engine.decode.decoding_sequence import (
    Agree,
    DecodingSequence,
    SampledToken,
    SingleSequence,
    as_chosen,
    normalised,
)
from hearth.worker.engine.decode.shared_trunk import (
    PLAIN,
    TailKVCache,
    Trunk,
    TrunkedKVCache,
    can_stand_on_trunk,
    merge_on_trunks,
)
from hearth.worker.engine.lora.lora_adapter import applied

STEP: Final = 256  # rows by which buffers grow, as mlx-lm's
PACKED: Final = "QuantizedKVCache"  # mlx-lm's and mlx-vlm's are alike


class Batch:
    """Sequences that share forwards, one ahead of what was returned. Never empty when it is used.

    Invariants: all have one adapter, or none; row n of each layer holds what `rows[n]` was fed; of
    the first of them, where it has a trunk, a layer of plain rows holds no copy. A layer at a time
    is copied, so that no more than one is there twice.
    """

    def __init__(
        self,
        model: Any,
        joining: list[SingleSequence],
        trunks: Mapping[str, Trunk],
        agree: Agree = as_chosen,
    ) -> None:
        """Take over sequences, which lose their caches, in this order. See `extend`."""
        self._model = model
        self._agree = agree
        self.kind = batch_kind(joining[0].row.cache)
        self.adapter = joining[0].row.adapter
        self.rows: list[DecodingSequence] = []
        self._layers: list[Any] = []
        self._tokens = mx.zeros((0,), mx.uint32)  # (rows,), sampled behind what the layers hold
        self._logprobs: mx.array | None = None  # (rows, vocabulary), by which they were
        self.extend(joining, trunks)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def length(self) -> int:
        """Tokens of the longest row without its trunk, which all are padded to."""
        return max((row.own_length for row in self.rows), default=0)

    @property
    def nbytes(self) -> int:
        """The bytes of all but the trunks, which other batches may hold too."""
        return sum(layer.nbytes for layer in self._layers)

    def extend(self, joining: list[SingleSequence], trunks: Mapping[str, Trunk]) -> None:
        """Take over more sequences, behind those that are here.

        `trunks` has, by its key, what each row is to stand on: of those here and those joining.
        """
        coming = [lone.row for lone in joining]
        for number in range(len(coming[0].cache)):
            layer = self._merged(coming, trunks, number)
            if self.rows:
                if isinstance(layer, TrunkedKVCache):
                    self._put_on_trunks(trunks, number)
                self._layers[number].extend(layer)
            else:
                self._layers.append(layer)
            mx.eval(self._layers[number].state)
        self.rows += coming
        for row in self.rows:
            row.trunk = trunks.get(row.request_id, row.trunk)
        before = [] if self._logprobs is None else [self._logprobs]
        self._logprobs = mx.concatenate([*before, *(lone.logprobs for lone in joining)])
        tokens = [self._tokens] if before else []
        self._tokens = mx.concatenate([*tokens, *(lone.token for lone in joining)])
        self._note_rows()

    def _merged(
        self, coming: list[DecodingSequence], trunks: Mapping[str, Trunk], number: int
    ) -> Any:
        """Return a layer of the rows that come, who lose it: on trunks if any is to be on one."""
        caches = [row.cache[number] for row in coming]
        for row in coming:
            row.cache[number] = None
        rows = (*self.rows, *coming)
        is_trunked = any(row.trunk is not None or row.request_id in trunks for row in rows)
        if is_trunked and can_stand_on_trunk(caches[0]):
            return merge_on_trunks(caches, _wanted(coming, trunks), number)
        return merge_caches([[cache] for cache in caches])[0]

    def _put_on_trunks(self, trunks: Mapping[str, Trunk], number: int) -> None:
        """Have a layer's rows stand on these trunks; they are copied where that is a change."""
        layer, wanted = self._layers[number], _wanted(self.rows, trunks)
        if any(trunk is not row.trunk for trunk, row in zip(wanted, self.rows, strict=True)):
            rows = [layer.extract(row) for row in range(len(self.rows))]
            self._layers[number] = merge_on_trunks(rows, wanted, number)
        elif not isinstance(layer, TrunkedKVCache):
            self._layers[number] = TrunkedKVCache(layer, [None] * len(self.rows))

    def _note_rows(self) -> None:
        """Find out what the rows have in common."""
        assert all(row.adapter is self.adapter for row in self.rows), "adapters share no forward"
        shifts = [row.shift for row in self.rows]
        # Models of text alone take no such argument.
        self._model_arguments = {"shift": shifts} if any(shifts) else {}
        samplers = [row.choice.sampler for row in self.rows]
        self._sampler = samplers[0] if len(set(samplers)) == 1 else None
        self._is_processed = any(row.context is not None for row in self.rows)

    def step(self) -> list[SampledToken]:
        """Return each row's token that was sampled last; the next are computed meanwhile."""
        tokens, logprobs = self._tokens, self._logprobs
        assert logprobs is not None
        self._feed(tokens)
        sampled = []
        ids: list[int] = tokens.tolist()  # type: ignore[assignment]
        for number, (row, token_id) in enumerate(zip(self.rows, ids, strict=True)):
            assert row.remaining > 0, "a sequence past its limit is removed, not stepped"
            row.remaining -= 1
            row.tokens.append(token_id)
            row.note([token_id])
            sampled.append(row.sampled(token_id, logprobs, number))
        return sampled

    def _feed(self, inputs: mx.array) -> None:
        """Feed `inputs` (rows,) and have what follows them sampled."""
        with applied(self.adapter):
            logits = self._model(inputs[:, None], cache=self._layers, **self._model_arguments)
        raw = logits = logits[:, -1, :]
        slices = [slice(number, number + 1) for number in range(len(self.rows))]
        if self._is_processed:
            logits = mx.concatenate(
                [
                    row.process(inputs[at], logits[at])
                    for row, at in zip(self.rows, slices, strict=True)
                ]
            )
        logprobs = normalised(logits)
        places = [row.next_place() for row in self.rows]
        if self._sampler is not None:
            chosen = self._sampler(logprobs, places)
        else:
            chosen = mx.concatenate(
                [
                    row.choice.sampler(logprobs[at], places[at])
                    for row, at in zip(self.rows, slices, strict=True)
                ]
            )
        self._tokens, self._logprobs = self._agree(raw, chosen), logprobs
        mx.async_eval(self._tokens, logprobs)  # type: ignore[no-untyped-call]

    def remove(self, key: str) -> tuple[DecodingSequence, tuple[mx.array, mx.array]] | None:
        """Give up a sequence, with what its cache holds and what was sampled; None if unknown.

        Layers of a row on a trunk hold its tail, and the trunk by reference: see `whole_rows`.
        Sampled are its next token (1,) and the log probabilities (1, vocabulary).
        """
        number = next((n for n, row in enumerate(self.rows) if row.request_id == key), None)
        if number is None:
            return None
        assert self._logprobs is not None
        row = self.rows.pop(number)
        kept = [n for n in range(len(self.rows) + 1) if n != number]
        row.cache = []
        for place, layer in enumerate(self._layers):
            row.cache.append(take_row(layer, number))
            if kept:
                layer.filter(kept)
                mx.eval(layer.state)
                if isinstance(layer, TrunkedKVCache) and not layer.groups:
                    self._layers[place] = layer.without_trunks()
        sampled = (self._tokens[number : number + 1], self._logprobs[number : number + 1])
        if kept:
            indices = mx.array(kept)
            self._tokens, self._logprobs = self._tokens[indices], self._logprobs[indices]
            self._note_rows()
        return row, sampled


def _wanted(rows: list[DecodingSequence], trunks: Mapping[str, Trunk]) -> list[Trunk | None]:
    """Return what each row is to stand on: by its key, else what it stands on now."""
    return [trunks.get(row.request_id, row.trunk) for row in rows]


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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
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
        return tuple(
            tuple(array[..., : self._idx, :] for array in arrays)
            for arrays in (self.keys, self.values)
        )

    def make_mask(self, N: int, return_array: bool = False, **more: Any) -> mx.array:
        """Return which rows each of the next `N` tokens may see: none of the padding."""
        mask = create_causal_mask(N, offset=self._idx, left_padding=self._padding, **more)
        return cast(mx.array, mask)

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
