"""Decodes several sequences in one forward, over the batch caches of mlx-lm and our own.

Mlx-lm and mlx-vlm have batch caches for the layers that they make. Mlx-lm has none for KV that is
quantised while the model runs. `model_trials.py` tries whether a model computes in a batch what it
computes alone.
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

STEP: Final = 256  # KV rows by which buffers grow, as in mlx-lm
# Models whose attention chooses blocks of tokens, or tokens. Padding shifts the blocks of a row, so
# that past 2,048 tokens its logits are half of the largest off. The other model fails in a batch.
UNPADDED: Final = ("minimax_m3_vl", "longcat_flash_sparse")
PACKED: Final = "QuantizedKVCache"  # the same name in mlx-lm and mlx-vlm


class Batch:
    """Decodes sequences that share forwards, one forward ahead of the tokens that were returned.

    Invariants: the batch is not empty when it is used. All its sequences have the same adapter, or
    none. Batch row n of each layer holds the KV of `sequences[n]`. If that sequence has a trunk,
    a layer that can be trunked holds only the KV after the trunk.
    Layers are copied one after another, so that at most one layer is in memory twice.
    """

    def __init__(
        self,
        model: Any,
        joining: list[SingleSequence],
        trunks: Mapping[str, Trunk],
        agree: Agree = as_chosen,
    ) -> None:
        """Take over the caches of these sequences, in this order. See `extend`."""
        self._model = model
        self._agree = agree
        self.kind = batch_kind(joining[0].sequence.cache)
        self.adapter = joining[0].sequence.adapter
        self.sequences: list[DecodingSequence] = []
        self._layers: list[Any] = []
        self._tokens = mx.zeros((0,), mx.uint32)  # sampled tokens (rows,), not fed yet
        self._logprobs: mx.array | None = None  # (rows, vocabulary), source of `_tokens`
        self.extend(joining, trunks)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence without its trunk: all are padded to this length."""
        return max((sequence.own_length for sequence in self.sequences), default=0)

    @property
    def nbytes(self) -> int:
        """The bytes of the layers without the trunks, which other batches may hold too."""
        return sum(layer.nbytes for layer in self._layers)

    def extend(self, joining: list[SingleSequence], trunks: Mapping[str, Trunk]) -> None:
        """Append more sequences.

        `trunks` maps request ids, of sequences in the batch and of joining ones, to the trunks that
        these sequences are to have.
        """
        added = [single.sequence for single in joining]
        for number in range(len(added[0].cache)):
            layer = self._merged(added, trunks, number)
            if self.sequences:
                if isinstance(layer, TrunkedKVCache):
                    self._put_on_trunks(trunks, number)
                self._layers[number].extend(layer)
            else:
                self._layers.append(layer)
            mx.eval(self._layers[number].state)
        self.sequences += added
        for sequence in self.sequences:
            sequence.trunk = trunks.get(sequence.request_id, sequence.trunk)
        before = [] if self._logprobs is None else [self._logprobs]
        self._logprobs = mx.concatenate([*before, *(single.logprobs for single in joining)])
        tokens = [self._tokens] if before else []
        self._tokens = mx.concatenate([*tokens, *(single.token for single in joining)])
        self._find_common()

    def _merged(
        self, added: list[DecodingSequence], trunks: Mapping[str, Trunk], number: int
    ) -> Any:
        """Merge layer `number` of the added sequences, and remove it from their caches.

        The layer is a TrunkedKVCache if any sequence of the batch is to have a trunk.
        """
        caches = [sequence.cache[number] for sequence in added]
        for sequence in added:
            sequence.cache[number] = None
        members = (*self.sequences, *added)
        is_trunked = any(
            sequence.trunk is not None or sequence.request_id in trunks for sequence in members
        )
        if is_trunked and can_stand_on_trunk(caches[0]):
            return merge_on_trunks(caches, _planned_trunks(added, trunks), number)
        return merge_caches([[cache] for cache in caches])[0]

    def _put_on_trunks(self, trunks: Mapping[str, Trunk], number: int) -> None:
        """Put a layer's batch rows on these trunks. The layer is copied where a trunk changes."""
        layer, planned = self._layers[number], _planned_trunks(self.sequences, trunks)
        if any(
            trunk is not sequence.trunk
            for trunk, sequence in zip(planned, self.sequences, strict=True)
        ):
            caches = [layer.extract(row) for row in range(len(self.sequences))]
            self._layers[number] = merge_on_trunks(caches, planned, number)
        elif not isinstance(layer, TrunkedKVCache):
            self._layers[number] = TrunkedKVCache(layer, [None] * len(self.sequences))

    def _find_common(self) -> None:
        """Update what depends on all sequences: position shifts, a common sampler, processors."""
        assert all(sequence.adapter is self.adapter for sequence in self.sequences), (
            "the sequences have different adapters"
        )
        shifts = [sequence.shift for sequence in self.sequences]
        # Text-only models take no `shift`.
        self._model_arguments = {"shift": shifts} if any(shifts) else {}
        samplers = [sequence.sampling.sampler for sequence in self.sequences]
        self._sampler = samplers[0] if len(set(samplers)) == 1 else None
        self._is_processed = any(sequence.context is not None for sequence in self.sequences)

    def step(self) -> list[SampledToken]:
        """Return each sequence's last sampled token. The next ones are computed meanwhile."""
        tokens, logprobs = self._tokens, self._logprobs
        assert logprobs is not None
        self._feed(tokens)
        sampled = []
        ids: list[int] = tokens.tolist()  # type: ignore[assignment]
        for row, (sequence, token_id) in enumerate(zip(self.sequences, ids, strict=True)):
            assert sequence.remaining > 0, "a sequence at its limit was not removed"
            sequence.remaining -= 1
            sequence.tokens.append(token_id)
            sequence.record([token_id])
            sampled.append(sequence.sampled(token_id, logprobs, row))
        return sampled

    def _feed(self, inputs: mx.array) -> None:
        """Feed `inputs` (rows,) and sample the next token of each sequence."""
        with applied(self.adapter):
            logits = self._model(inputs[:, None], cache=self._layers, **self._model_arguments)
        raw_logits = logits = logits[:, -1, :]
        slices = [slice(row, row + 1) for row in range(len(self.sequences))]
        if self._is_processed:
            logits = mx.concatenate(
                [
                    sequence.process(inputs[row], logits[row])
                    for sequence, row in zip(self.sequences, slices, strict=True)
                ]
            )
        logprobs = normalised(logits)
        positions = [sequence.next_position() for sequence in self.sequences]
        if self._sampler is not None:
            chosen = self._sampler(logprobs, positions)
        else:
            chosen = mx.concatenate(
                [
                    sequence.sampling.sampler(logprobs[row], positions[row])
                    for sequence, row in zip(self.sequences, slices, strict=True)
                ]
            )
        self._tokens, self._logprobs = self._agree(raw_logits, chosen), logprobs
        mx.async_eval(self._tokens, logprobs)  # type: ignore[no-untyped-call]

    def remove(self, request_id: str) -> tuple[DecodingSequence, tuple[mx.array, mx.array]] | None:
        """Remove a sequence. Return it, with its own cache, and its next token; None if unknown.

        The token (1,) comes with the log probabilities (1, vocabulary) that it was drawn from. A
        layer of a sequence on a trunk is a TailKVCache: see `copy_trunk_rows`.
        """
        row = next((n for n, s in enumerate(self.sequences) if s.request_id == request_id), None)
        if row is None:
            return None
        assert self._logprobs is not None
        sequence = self.sequences.pop(row)
        kept = [n for n in range(len(self.sequences) + 1) if n != row]
        sequence.cache = []
        for number, layer in enumerate(self._layers):
            sequence.cache.append(take_row(layer, row))
            if kept:
                layer.filter(kept)
                mx.eval(layer.state)
                if isinstance(layer, TrunkedKVCache) and not layer.groups:
                    self._layers[number] = layer.without_trunks()
        sampled = (self._tokens[row : row + 1], self._logprobs[row : row + 1])
        if kept:
            indices = mx.array(kept)
            self._tokens, self._logprobs = self._tokens[indices], self._logprobs[indices]
            self._find_common()
        return sequence, sampled


def _planned_trunks(
    sequences: list[DecodingSequence], trunks: Mapping[str, Trunk]
) -> list[Trunk | None]:
    """Return each sequence's trunk: the one in `trunks`, otherwise its present one."""
    return [trunks.get(sequence.request_id, sequence.trunk) for sequence in sequences]


class BatchQuantizedKVCache:
    """The quantised K and V of several sequences in one layer, each padded on its left.

    It does for QuantizedKVCache what mlx-lm's BatchKVCache does for KVCache, under the same names.
    `keys` and `values` are (packed, scales, biases), each (batch, heads, KV rows, width). The first
    `_idx` KV rows are written. A sequence's own rows begin after its `_padding`. (The name is not
    `left_padding`: mlx-vlm's Qwen3.5 takes a cache with that attribute for unquantised KV, and
    would mask nothing here.)
    Owner: the inference thread.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        """Copy this layer's caches of several sequences. None of them may be empty."""
        first = caches[0]
        self.bits, self.group_size = first.bits, first.group_size  # read by upstream's attention
        self._single_class = type(first)
        lengths: list[int] = [cache.offset for cache in caches]
        assert min(lengths) > 0, lengths
        self._idx = max(lengths)
        padding = [self._idx - length for length in lengths]
        self.keys = _stacked([cache.keys for cache in caches], lengths, self._idx)
        self.values = _stacked([cache.values for cache in caches], lengths, self._idx)
        self._padding = mx.array(padding)
        self.offset = mx.array(lengths)  # tokens of each sequence; positions continue from them

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, ...]:
        """Append K and V (batch, heads, n, width) of the next tokens; return all, quantised."""
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
        """Return the mask of the KV rows that each of the next `N` tokens may attend to."""
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
        """Append the sequences of another batch."""
        end = max(self._idx, other._idx)
        pair = (self, other)
        rows = max(end - batch._idx + batch.keys[0].shape[2] for batch in pair)

        def joined(own_array: Any, other_array: Any) -> mx.array:
            parts = []
            for batch, array in zip(pair, (own_array, other_array), strict=True):
                left = end - batch._idx
                parts.append(_padded(array, left, rows - left - array.shape[2]))
            return mx.concatenate(parts)

        self.keys = tuple(map(joined, self.keys, other.keys))
        self.values = tuple(map(joined, self.values, other.values))
        self._padding = mx.concatenate([batch._padding + (end - batch._idx) for batch in pair])
        self.offset = mx.concatenate([self.offset, other.offset])
        self._idx = end

    def extract(self, idx: int) -> Any:
        """Return a sequence in a cache of its own, of the class that its cache had before."""
        single = self._single_class(group_size=self.group_size, bits=self.bits)
        start: int = self._padding[idx].item()  # type: ignore[assignment]
        single.keys, single.values = (
            tuple(mx.contiguous(a[idx : idx + 1, :, start : self._idx]) for a in arrays)
            for arrays in (self.keys, self.values)
        )
        single.offset = self._idx - start
        return single

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


def pads_exactly(network: Any) -> bool:
    """Whether a long row of a batch gets the logits that it gets alone, as far as is known.

    `network` is upstream's module. A trial reads too few tokens to find what these models do.
    """
    return not any(name in type(network).__module__.split(".") for name in UNPADDED)


def is_mergeable(cache: Sequence[Any]) -> bool:
    """Whether several caches like this one can be merged into a batch."""
    return all(
        type(layer).__name__ == PACKED
        or (hasattr(layer, "merge") and is_mergeable(getattr(layer, "caches", ())))
        for layer in cache
    )


def batch_kind(cache: Sequence[Any]) -> Hashable:
    """Return the class and the bits of each layer. Caches of one batch have the same kind."""
    plain = [layer.tail if isinstance(layer, TailKVCache) else layer for layer in cache]
    return tuple((type(layer).__name__, getattr(layer, "bits", None)) for layer in plain)


def keeps_plain_rows(kind: Hashable) -> bool:
    """Whether caches of this `batch_kind` have layers that can be trunked."""
    return isinstance(kind, tuple) and any(name == PLAIN for name, _ in kind)


def merge_caches(caches: Sequence[Sequence[Any]]) -> list[Any]:
    """Return a batch's layers: lazy copies of the layers of these caches.

    The layers have `extend`, `filter` and `extract`, and an `offset` for each batch row.
    """
    assert len({batch_kind(cache) for cache in caches}) == 1, (
        "packed rows and others share no batch"
    )
    return [
        BatchQuantizedKVCache(layers)
        if type(layers[0]).__name__ == PACKED
        else layers[0].merge(list(layers))
        for layers in zip(*caches, strict=True)
    ]


def take_row(layer: Any, row: int) -> Any:
    """Return a batch row in a cache of its own, evaluated. No other row's memory is kept."""
    single = layer.extract(row)
    for part in getattr(single, "caches", (single,)):
        if hasattr(part, "cache"):  # recurrent states: upstream returns views of all rows' states
            part.cache = [None if state is None else mx.contiguous(state) for state in part.cache]
    mx.eval(single.state)
    return single


def _stacked(
    quantised: Sequence[Sequence[mx.array]], lengths: Sequence[int], end: int
) -> tuple[mx.array, ...]:
    """Join the (packed, scales, biases) of all sequences, padded on the left to length `end`."""
    return tuple(
        mx.concatenate(
            [
                _padded(array[..., :length, :], end - length, 0)
                for array, length in zip(arrays, lengths, strict=True)
            ]
        )
        for arrays in zip(*quantised, strict=True)
    )


def _padded(array: mx.array, left: int, right: int) -> mx.array:
    """Return an array (batch, heads, KV rows, width) with rows of zeros added at both ends."""
    return mx.pad(array, [(0, 0), (0, 0), (left, right), (0, 0)]) if left or right else array
