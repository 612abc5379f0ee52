"""Decodes several sequences in one forward, over the batch caches of mlx-lm and our own.

Owner: the inference thread.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from hearth.worker.engine.decode.batch_caches import batch_kind, merge_caches, take_row
from hearth.worker.engine.decode.decoding_sequence import (
    Agree,
    DecodingRow,
    SampledToken,
    as_chosen,
    normalised,
)
from hearth.worker.engine.decode.lone_sequence import LoneSequence
from hearth.worker.engine.decode.shared_trunk import (
    Trunk,
    TrunkedKVCache,
    can_stand_on_trunk,
    merge_on_trunks,
)
from hearth.worker.engine.lora.lora_adapter import applied


class Batch:
    """Sequences that share forwards, one ahead of what was returned. Never empty when it is used.

    Invariants: all have one adapter, or none; row n of each layer holds what `rows[n]` was fed; of
    the first of them, where it has a trunk, a layer of plain rows holds no copy. A layer at a time
    is copied, so that no more than one is there twice.
    """

    def __init__(
        self,
        model: Any,
        joining: list[LoneSequence],
        trunks: Mapping[str, Trunk] | None = None,
        agree: Agree = as_chosen,
    ) -> None:
        """Take over sequences, which lose their caches, in this order. See `extend`."""
        self._model = model
        self._agree = agree
        self.kind = batch_kind(joining[0].cache)
        self.adapter = joining[0].row.adapter
        self.rows: list[DecodingRow] = []
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
    def trunks(self) -> list[Trunk]:
        """Those that any row stands on, each once."""
        return list(dict.fromkeys(row.trunk for row in self.rows if row.trunk is not None))

    @property
    def nbytes(self) -> int:
        """The bytes of all but the trunks, which other batches may hold too."""
        return sum(layer.nbytes for layer in self._layers)

    def extend(
        self, joining: list[LoneSequence], trunks: Mapping[str, Trunk] | None = None
    ) -> None:
        """Take over more sequences, behind those that are here.

        `trunks` has, by its key, what each row is to stand on: of those here and those joining.
        """
        trunks = trunks or {}
        for number in range(len(joining[0].cache)):
            layer = self._merged(joining, trunks, number)
            if self.rows:
                self._put_on_trunks(trunks, number, isinstance(layer, TrunkedKVCache))
                self._layers[number].extend(layer)
            else:
                self._layers.append(layer)
            mx.eval(self._layers[number].state)
        self.rows += [lone.row for lone in joining]
        for row in self.rows:
            row.trunk = trunks.get(row.key, row.trunk)
        before = [] if self._logprobs is None else [self._logprobs]
        self._logprobs = mx.concatenate([*before, *(lone.logprobs for lone in joining)])
        tokens = [self._tokens] if before else []
        self._tokens = mx.concatenate([*tokens, *(lone.token for lone in joining)])
        self._note_rows()

    def _merged(self, joining: list[LoneSequence], trunks: Mapping[str, Trunk], number: int) -> Any:
        """Return a layer of who joins, who loses it: on trunks if anybody is to be on one."""
        caches = [lone.cache[number] for lone in joining]
        for lone in joining:
            lone.cache[number] = None
        keys = [row.key for row in self.rows] + [lone.row.key for lone in joining]
        is_plain = can_stand_on_trunk(caches[0])
        if is_plain and (self.trunks or any(key in trunks for key in keys)):
            rows = [lone.row for lone in joining]
            wanted = [trunks.get(row.key, row.trunk) for row in rows]
            return merge_on_trunks(caches, wanted, number)
        return merge_caches([[cache] for cache in caches])[0]

    def _put_on_trunks(self, trunks: Mapping[str, Trunk], number: int, is_trunked: bool) -> None:
        """Have a layer's rows stand on these trunks; they are copied where that is a change."""
        if not is_trunked:
            return
        layer = self._layers[number]
        wanted = [trunks.get(row.key, row.trunk) for row in self.rows]
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
            row.fed.append(token_id)
            row.note([token_id])
            wanted = logprobs[number] if row.wants_logprobs else None
            sampled.append(SampledToken(row.key, token_id, wanted))
        return sampled

    def _feed(self, inputs: mx.array) -> None:
        """Feed `inputs` (rows,) and have what follows them sampled."""
        with applied(self.adapter):
            logits = self._model(inputs[:, None], cache=self._layers, **self._model_arguments)
        told = logits = logits[:, -1, :]
        if self._is_processed:
            logits = mx.concatenate(
                [
                    row.process(inputs[number : number + 1], logits[number : number + 1])
                    for number, row in enumerate(self.rows)
                ]
            )
        logprobs = normalised(logits)
        places = [row.next_place() for row in self.rows]
        if self._sampler is not None:
            chosen = self._sampler(logprobs, places)
        else:
            chosen = mx.concatenate(
                [
                    row.choice.sampler(logprobs[number : number + 1], places[number : number + 1])
                    for number, row in enumerate(self.rows)
                ]
            )
        self._tokens, self._logprobs = self._agree(told, chosen), logprobs
        mx.async_eval(self._tokens, logprobs)  # type: ignore[no-untyped-call]

    def remove(self, key: str) -> LoneSequence | None:
        """Give up a sequence, with what its cache holds and what was sampled; None if unknown.

        Layers of a row on a trunk hold its tail, and the trunk by reference: see `whole_rows`.
        """
        number = next((n for n, row in enumerate(self.rows) if row.key == key), None)
        if number is None:
            return None
        assert self._logprobs is not None
        row = self.rows.pop(number)
        kept = [n for n in range(len(self.rows) + 1) if n != number]
        cache = []
        for place, layer in enumerate(self._layers):
            cache.append(take_row(layer, number))
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
        return LoneSequence.of_batch(self._model, row, cache, sampled, self._agree)
