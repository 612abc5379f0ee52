"""Decodes all running sequences one step at a time, each alone in its own cache or in a batch.

A single sequence decodes in the cache that it was prefilled in, without a copy. The bytes that a
step reads decide which sequences share a forward (`batch_split.py`). Sequences join, leave and
change batches between two steps. In a batch, sequences with the same beginning share its KV, a
trunk (`plan_trunks`). If a model's caches cannot be merged, each of its sequences decodes alone.
Owner: the inference thread.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import mlx.core as mx

from hearth.worker.engine.decode.batch import Batch, batch_kind, keeps_plain_rows
from hearth.worker.engine.decode.batch_split import (
    TRUNK_TOKENS_MIN,
    ReadCost,
    RowLength,
    plan_trunks,
    regroup,
)
from hearth.worker.engine.decode.decoding_sequence import (
    Agree,
    DecodingSequence,
    SampledToken,
    SingleSequence,
    as_chosen,
)
from hearth.worker.engine.decode.shared_trunk import Trunk, copy_trunk_rows
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.lora.lora_adapter import LoraAdapter
from hearth.worker.engine.mlx_memory import return_freed

ROWS_MAX: Final = 64  # the largest MAX_CONCURRENT_REQUESTS
REGROUP_EVERY_STEPS: Final = 256  # all lengths grow alike, so a grouping stays good for long

__all__ = ["Decoder", "DecodingSequence", "SampledToken"]


class Decoder:
    """Decodes all sequences, each alone or in one batch.

    `step` returns one token for each sequence, or more if a draft is accepted. Only a sequence
    without others to share a forward has drafts. `cost` estimates what a step reads. `has_room`
    says whether a number of additional bytes may be held; a sequence without room does not join a
    batch. Sequences share a trunk of at least `trunk_tokens_min` tokens if `try_trunks`, called
    before the first trunk, finds that the model can.
    Invariant: between two calls a single sequence has all of its KV in its own cache.
    Owner: the inference thread.
    """

    def __init__(
        self,
        model: Any,
        stream: Any,
        is_mergeable: bool,
        tree_forward: TreeForward | None = None,
        try_trunks: Callable[[], bool] = lambda: False,
        agree: Agree = as_chosen,
    ) -> None:
        """Without `tree_forward` drafts have no branches. `try_trunks` is called at most once."""
        self.is_mergeable = is_mergeable
        self._tree_forward = tree_forward
        self.takes_trees = tree_forward is not None  # whether drafts may have branches
        self.cost = ReadCost()
        self.has_room: Callable[[int], bool] = lambda _nbytes: True
        self.trunk_tokens_min = TRUNK_TOKENS_MIN
        self._try_trunks = try_trunks
        # Whether the model can share trunks. None = not tried yet.
        self.shares_trunks: bool | None = None
        self._model = model
        self._stream = stream
        self._agree = agree
        self._single: dict[str, SingleSequence] = {}
        self._batches: list[Batch] = []
        self._numbers = itertools.count()
        self._steps = 0
        self._is_changed = False

    def __len__(self) -> int:
        return len(self._single) + sum(map(len, self._batches))

    @property
    def batch_request_ids(self) -> list[set[str]]:
        """The request ids of the sequences in each batch."""
        return [{sequence.request_id for sequence in batch.sequences} for batch in self._batches]

    @property
    def batch_bytes(self) -> int:
        """The bytes of KV outside the slots' caches: the batches, and each trunk once."""
        trunks = set(self.trunks.values())
        return sum(batch.nbytes for batch in self._batches) + sum(trunk.nbytes for trunk in trunks)

    @property
    def trunks(self) -> dict[str, Trunk]:
        """The trunks by request id, of the sequences that have one."""
        sequences = [sequence for batch in self._batches for sequence in batch.sequences]
        return {
            sequence.request_id: sequence.trunk
            for sequence in sequences
            if sequence.trunk is not None
        }

    def trunks_report(self) -> dict[str, int]:
        """Return for `/v1/cache` how many trunks are shared, and how many bytes this saves."""
        users = Counter(self.trunks.values())
        spared = sum((count - 1) * trunk.nbytes for trunk, count in users.items())
        return {"count": len(users), "rows": users.total(), "spared_bytes": spared}

    def add(self, sequence: DecodingSequence) -> None:
        """Add a sequence and feed its prompt's tail. The next `step` returns its first token."""
        assert sequence.tail, "the prompt has no tail to feed"
        assert sequence.request_id not in self._single, sequence.request_id
        with mx.stream(self._stream):
            sequence.begin(next(self._numbers))
            self._decode_alone(sequence)
        self._is_changed = True

    def _decode_alone(
        self, sequence: DecodingSequence, sampled: tuple[mx.array, mx.array] | None = None
    ) -> SingleSequence:
        single = SingleSequence(self._model, sequence, self._tree_forward, self._agree, sampled)
        self._single[sequence.request_id] = single
        return single

    def step(self) -> list[SampledToken]:
        """Return the next tokens of each sequence, in order."""
        self._steps += 1
        with mx.stream(self._stream):
            if self.is_mergeable and (self._is_changed or self._steps % REGROUP_EVERY_STEPS == 0):
                self._regroup()
            sampled = [token for batch in self._batches for token in batch.step()]
            may_draft = not self.is_mergeable or len(self) == 1
            for single in self._single.values():
                sampled += single.step(may_draft)
        return_freed()
        return sampled

    def remove(self, request_id: str, kept: int | None = None) -> DecodingSequence | None:
        """Remove a sequence that ended or was cancelled; return it with its cache; None if unknown.

        `kept` is how many returned tokens belong to the answer; None = all. An answer may end
        within a draft.
        """
        with mx.stream(self._stream):
            single = self._single.pop(request_id, None)
            if single is None:
                for batch in self._batches:
                    if self._leave(batch, request_id):
                        single = self._single.pop(request_id)
                self._dissolve()
            if single is None:
                return None
            sequence = single.sequence
            copy_trunk_rows(sequence.cache)
            self._is_changed = True
            single.sync_cache(0 if kept is None else sequence.returned - kept)
            mx.eval([layer.state for layer in sequence.cache])
        return_freed()
        return sequence

    # ------------------------------------------------------------ which sequences share a forward

    def _regroup(self) -> None:
        """Group sequences into batches so that steps read the fewest bytes, where that pays.

        Sequences with different adapters share no batch.
        """
        self._is_changed = False
        kinds: dict[tuple[Hashable, LoraAdapter | None], list[list[DecodingSequence]]] = {}
        for batch in self._batches:
            kinds.setdefault((batch.kind, batch.adapter), []).append(batch.sequences)
        for single in self._single.values():
            if single.sequence.remaining > 1:  # a sequence that is about to end gains nothing
                kind = batch_kind(single.sequence.cache)
                kinds.setdefault((kind, single.sequence.adapter), []).append([single.sequence])
        for (kind, _), groups in kinds.items():
            if len(groups) > 1 or len(groups[0]) > 1:
                self._regroup_kind(kind, groups)

    def _regroup_kind(self, kind: Hashable, groups: list[list[DecodingSequence]]) -> None:
        sequences = [sequence for group in groups for sequence in group]
        trunks: dict[str, Trunk] = {}
        if keeps_plain_rows(kind) and self.shares_trunks is not False:
            planned = plan_trunks(sequences, self.trunk_tokens_min)
            if planned and self.shares_trunks is None:
                self.shares_trunks = self._try_trunks()
            trunks = planned if self.shares_trunks else {}
        wanted = regroup(
            [[_length(sequence, sequence.trunk) for sequence in group] for group in groups],
            self.cost,
            ROWS_MAX,
            [_length(sequence, trunks.get(sequence.request_id)) for sequence in sequences],
        )
        if wanted is not None:
            for group in wanted:
                self._gather({sequences[index].request_id for index in group}, trunks)
            self._dissolve()

    def _gather(self, request_ids: set[str], trunks: Mapping[str, Trunk]) -> None:
        """Put exactly these sequences, on `trunks`, into the batch that has most of them now.

        If there is no room for all, the sequences with the most bytes stay where they are.
        """
        request_ids = self._fitting(request_ids, trunks)
        if not request_ids:
            return
        home = self._home_of(request_ids)
        for batch in sorted(self._batches, key=lambda batch: batch is not home):
            for request_id in [
                sequence.request_id
                for sequence in batch.sequences
                if (sequence.request_id in request_ids) != (batch is home)
            ]:
                self._leave(batch, request_id)
        self._batches = [batch for batch in self._batches if len(batch)]
        joining = sorted(
            (single for request_id, single in self._single.items() if request_id in request_ids),
            key=lambda single: single.sequence.number,
        )
        if not joining or (home is None and len(joining) < 2):
            return
        for single in joining:
            del self._single[single.sequence.request_id]
            single.sync_cache()
            single.sequence.lend()
        if home is None:
            self._batches.append(Batch(self._model, joining, trunks, self._agree))
        else:
            home.extend(joining, trunks)

    def _home_of(self, request_ids: set[str]) -> Batch | None:
        """Return the batch that has most of these sequences; None if they are in no batch."""
        counts = [
            (sum(sequence.request_id in request_ids for sequence in batch.sequences), batch)
            for batch in self._batches
        ]
        count, batch = max(counts, key=lambda pair: pair[0], default=(0, None))
        return batch if count else None

    def _fitting(self, request_ids: set[str], trunks: Mapping[str, Trunk]) -> set[str]:
        """Return the sequences that fit into memory in one batch; the largest are left out.

        A single request id is returned as it is. The set is empty where no two sequences fit.
        """
        if len(request_ids) < 2:
            return request_ids
        sequences = [single.sequence for single in self._single.values()]
        sequences += [sequence for batch in self._batches for sequence in batch.sequences]
        fitting = [sequence for sequence in sequences if sequence.request_id in request_ids]

        def without(left: DecodingSequence) -> int:
            return self._bytes_together([other for other in fitting if other is not left], trunks)

        while len(fitting) > 1 and not self._finds_room(self._bytes_together(fitting, trunks)):
            fitting.remove(min(fitting, key=without))
        return {sequence.request_id for sequence in fitting} if len(fitting) > 1 else set()

    def _finds_room(self, nbytes: int) -> bool:
        return self.has_room(nbytes)

    def _bytes_together(
        self, sequences: list[DecodingSequence], trunks: Mapping[str, Trunk]
    ) -> int:
        """Return how many more bytes are held once these sequences share a batch."""
        home = self._home_of({sequence.request_id for sequence in sequences})
        lengths = [_length(sequence, trunks.get(sequence.request_id)) for sequence in sequences]
        longest = max(length.own for length in lengths)
        tokens = sum({length.trunk: length.trunk_length for length in lengths}.values())
        tokens -= sum(
            trunk.length
            for trunk in {sequence.trunk for sequence in sequences}
            if trunk is not None
        )
        for sequence in sequences:
            padded = (
                home.length
                if home is not None and sequence in home.sequences
                else sequence.own_length
            )
            tokens += longest - padded
        joining = sum(sequence.join_bytes() for sequence in sequences if not sequence.is_lent)
        return round(max(0, tokens) * self.cost.row_bytes) + joining

    def _dissolve(self) -> None:
        """Take the sequence out of each batch of one: a batch masks, and may copy, its rows.

        Each single sequence gets a copy of its trunk, and its slot gets the cache.
        """
        for batch in self._batches:
            if len(batch) == 1:
                self._leave(batch, batch.sequences[0].request_id)
        self._batches = [batch for batch in self._batches if len(batch)]
        shared = {sequence.trunk for batch in self._batches for sequence in batch.sequences}
        for single in self._single.values():
            sequence = single.sequence
            if sequence.trunk is not None and sequence.trunk not in shared:
                sequence.trunk.layers.clear()  # so that a layer's memory is freed once it is copied
            copy_trunk_rows(sequence.cache)
            sequence.trunk = None
            sequence.give_back()

    def _leave(self, batch: Batch, request_id: str) -> bool:
        """Move a sequence out of a batch, to decode alone. Returns whether it was in the batch."""
        found = batch.remove(request_id)
        if found is not None:
            self._decode_alone(*found)
        return found is not None


def _length(sequence: DecodingSequence, trunk: Trunk | None) -> RowLength:
    """Return what a step reads of a sequence on this trunk."""
    shared = trunk.length if trunk is not None else 0
    return RowLength(len(sequence.tokens) - shared, trunk, shared)
