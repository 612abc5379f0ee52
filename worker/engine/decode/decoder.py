"""Decodes one token at a time for every running sequence, alone in its own cache or batched.

A lone sequence decodes in the cache that it was prefilled in, without a copy. Which sequences share
a forward is decided by the bytes that a step reads (`batch_split.py`); they join, leave and change
batches between any two steps. Those that begin alike share one trunk of KV in a batch
(`plan_trunks`). Models whose caches cannot be merged take turns alone.
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
from hearth.worker.engine.decode.shared_trunk import Trunk, whole_rows
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.lora.lora_adapter import LoraAdapter
from hearth.worker.engine.mlx_memory import return_freed

ROWS_MAX: Final = 64  # as many as MAX_CONCURRENT_REQUESTS may be
REGROUP_EVERY_STEPS: Final = 256  # lengths all grow alike, so that a grouping stays good for long

__all__ = ["Decoder", "DecodingSequence", "SampledToken"]


class Decoder:
    """All sequences that decode now, each alone or in one batch.

    Invariant: `step` returns one token for each, and more for one whose draft it verifies: one
    that would share a forward with nobody. `cost` tells what a step reads, `has_room` whether so
    many bytes more may be held: who finds none stays alone. Rows share a trunk of at least
    `trunk_tokens_min` where the model can: `try_trunks` says so, once some would. Between two calls
    a sequence that is alone has all of its KV in its own cache.
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
        """Without a `tree_forward` drafts have no branches. `try_trunks` is called once at most."""
        self.is_mergeable = is_mergeable
        self._tree_forward = tree_forward
        self.takes_trees = tree_forward is not None  # whether drafts may have branches
        self.cost = ReadCost()
        self.has_room: Callable[[int], bool] = lambda _nbytes: True
        self.trunk_tokens_min = TRUNK_TOKENS_MIN
        self._try_trunks = try_trunks
        # Whether rows share trunks: some would, and the model can. None: nobody would so far.
        self.shares_trunks: bool | None = None
        self._model = model
        self._stream = stream
        self._agree = agree
        self._lone: dict[str, SingleSequence] = {}
        self._batches: list[Batch] = []
        self._numbers = itertools.count()
        self._steps = 0
        self._is_changed = False

    def __len__(self) -> int:
        return len(self._lone) + sum(map(len, self._batches))

    @property
    def batch_keys(self) -> list[set[str]]:
        """The keys of the sequences that share each batch."""
        return [{row.request_id for row in batch.rows} for batch in self._batches]

    @property
    def batch_bytes(self) -> int:
        """The bytes of KV in no slot's own cache: of batches, each trunk once."""
        trunks = set(self.trunks.values())
        return sum(batch.nbytes for batch in self._batches) + sum(each.nbytes for each in trunks)

    @property
    def trunks(self) -> dict[str, Trunk]:
        """What the sequences that share one stand on, by their keys."""
        rows = [row for batch in self._batches for row in batch.rows]
        return {row.request_id: row.trunk for row in rows if row.trunk is not None}

    def trunks_report(self) -> dict[str, int]:
        """Return for `/v1/cache` how many trunks are shared, and the bytes spared so."""
        rows_of = Counter(self.trunks.values())
        spared = sum((rows - 1) * trunk.nbytes for trunk, rows in rows_of.items())
        return {"count": len(rows_of), "rows": rows_of.total(), "spared_bytes": spared}

    def add(self, sequence: DecodingSequence) -> None:
        """Feed the prompt's tail; the first answer token comes with the next `step`."""
        assert sequence.tail, "the last token's logits are not known without a forward"
        assert sequence.request_id not in self._lone, sequence.request_id
        with mx.stream(self._stream):
            sequence.begin(next(self._numbers))
            self._decode_alone(sequence)
        self._is_changed = True

    def _decode_alone(
        self, row: DecodingSequence, sampled: tuple[mx.array, mx.array] | None = None
    ) -> SingleSequence:
        lone = SingleSequence(self._model, row, self._tree_forward, self._agree, sampled)
        self._lone[row.request_id] = lone
        return lone

    def step(self) -> list[SampledToken]:
        """Return the next tokens of each sequence, in order."""
        self._steps += 1
        with mx.stream(self._stream):
            if self.is_mergeable and (self._is_changed or self._steps % REGROUP_EVERY_STEPS == 0):
                self._regroup()
            sampled = [one for batch in self._batches for one in batch.step()]
            may_draft = not self.is_mergeable or len(self) == 1
            for lone in self._lone.values():
                sampled += lone.step(may_draft)
        return_freed()
        return sampled

    def remove(self, key: str, said: int | None = None) -> DecodingSequence | None:
        """Forget a sequence that ended or was cancelled; return it as it is left, None if unknown.

        `said` is how many of the tokens that were returned for it were said, where not all: an
        answer may end amid a draft.
        """
        with mx.stream(self._stream):
            lone = self._lone.pop(key, None)
            if lone is None:
                for batch in self._batches:
                    if self._leave(batch, key):
                        lone = self._lone.pop(key)
                self._dissolve()
            if lone is None:
                return None
            row = lone.row
            whole_rows(row.cache)
            self._is_changed = True
            lone.settle(0 if said is None else row.returned - said)
            mx.eval([layer.state for layer in row.cache])
        return_freed()
        return row

    # ------------------------------------------------------------ who shares a forward

    def _regroup(self) -> None:
        """Have sequences share forwards as reads the fewest bytes, where that pays.

        Those of two adapters never do.
        """
        self._is_changed = False
        kinds: dict[tuple[Hashable, LoraAdapter | None], list[list[DecodingSequence]]] = {}
        for batch in self._batches:
            kinds.setdefault((batch.kind, batch.adapter), []).append(batch.rows)
        for lone in self._lone.values():
            if lone.row.remaining > 1:  # one that is about to end gains nothing
                kind = batch_kind(lone.row.cache)
                kinds.setdefault((kind, lone.row.adapter), []).append([lone.row])
        for (kind, _), groups in kinds.items():
            if len(groups) > 1 or len(groups[0]) > 1:
                self._regroup_kind(kind, groups)

    def _regroup_kind(self, kind: Hashable, now: list[list[DecodingSequence]]) -> None:
        rows = [row for group in now for row in group]
        trunks: dict[str, Trunk] = {}
        if keeps_plain_rows(kind) and self.shares_trunks is not False:
            planned = plan_trunks(rows, self.trunk_tokens_min)
            if planned and self.shares_trunks is None:
                self.shares_trunks = self._try_trunks()
            trunks = planned if self.shares_trunks else {}
        wanted = regroup(
            [[_length(row, row.trunk) for row in group] for group in now],
            self.cost,
            ROWS_MAX,
            [_length(row, trunks.get(row.request_id)) for row in rows],
        )
        if wanted is not None:
            for group in wanted:
                self._gather({rows[index].request_id for index in group}, trunks)
            self._dissolve()

    def _gather(self, keys: set[str], trunks: Mapping[str, Trunk]) -> None:
        """Bring these sequences together, and nobody else: in the batch that has most of them.

        They stand on `trunks` there. Where not all have room, those that take most stay as they
        are.
        """
        keys = self._fitting(keys, trunks)
        if not keys:
            return
        home = self._home_of(keys)
        for batch in sorted(self._batches, key=lambda batch: batch is not home):
            for key in [
                row.request_id for row in batch.rows if (row.request_id in keys) != (batch is home)
            ]:
                self._leave(batch, key)
        self._batches = [batch for batch in self._batches if len(batch)]
        joining = sorted(
            (lone for key, lone in self._lone.items() if key in keys),
            key=lambda lone: lone.row.number,
        )
        if not joining or (home is None and len(joining) < 2):
            return
        for lone in joining:
            del self._lone[lone.row.request_id]
            lone.settle()
            lone.row.lend()
        if home is None:
            self._batches.append(Batch(self._model, joining, trunks, self._agree))
        else:
            home.extend(joining, trunks)

    def _home_of(self, keys: set[str]) -> Batch | None:
        """Return the batch that has most of these sequences; None where none has any."""
        counts = [
            (sum(row.request_id in keys for row in batch.rows), batch) for batch in self._batches
        ]
        count, batch = max(counts, key=lambda each: each[0], default=(0, None))
        return batch if count else None

    def _fitting(self, keys: set[str], trunks: Mapping[str, Trunk]) -> set[str]:
        """Return those of the sequences that have room beside each other: who takes most stays out.

        A single one is what it is now; of several none where no two have room.
        """
        if len(keys) < 2:
            return keys
        rows = [lone.row for lone in self._lone.values()]
        rows += [row for batch in self._batches for row in batch.rows]
        found = [row for row in rows if row.request_id in keys]

        def without(left: DecodingSequence) -> int:
            return self._bytes_together([row for row in found if row is not left], trunks)

        while len(found) > 1 and not self._finds_room(self._bytes_together(found, trunks)):
            found.remove(min(found, key=without))
        return {row.request_id for row in found} if len(found) > 1 else set()

    def _finds_room(self, nbytes: int) -> bool:
        return self.has_room(nbytes)

    def _bytes_together(self, rows: list[DecodingSequence], trunks: Mapping[str, Trunk]) -> int:
        """Return what is held more once these share a batch: beside that, a row is moved."""
        home = self._home_of({row.request_id for row in rows})
        lengths = [_length(row, trunks.get(row.request_id)) for row in rows]
        longest = max(length.own for length in lengths)
        tokens = sum({length.trunk: length.trunk_length for length in lengths}.values())
        tokens -= sum(trunk.length for trunk in {row.trunk for row in rows} if trunk is not None)
        for row in rows:
            held = home.length if home is not None and row in home.rows else row.own_length
            tokens += longest - held
        joining = sum(row.join_bytes() for row in rows if not row.is_lent)
        return round(max(0, tokens) * self.cost.row_bytes) + joining

    def _dissolve(self) -> None:
        """Let who is left alone in a batch decode alone: a batch masks, and may copy, its rows.

        Who is alone now decodes in its slot's own cache, its trunk's rows included.
        """
        for batch in self._batches:
            if len(batch) == 1:
                self._leave(batch, batch.rows[0].request_id)
        self._batches = [batch for batch in self._batches if len(batch)]
        shared = {row.trunk for batch in self._batches for row in batch.rows}
        for lone in self._lone.values():
            row = lone.row
            if row.trunk is not None and row.trunk not in shared:
                row.trunk.layers.clear()  # so that each goes when it was copied
            whole_rows(row.cache)
            row.trunk = None
            row.give_back()

    def _leave(self, batch: Batch, key: str) -> bool:
        """Have a sequence leave a batch, if it is in it, and decode alone."""
        found = batch.remove(key)
        if found is not None:
            self._decode_alone(*found)
        return found is not None


def _length(row: DecodingSequence, trunk: Trunk | None) -> RowLength:
    """Return what a step reads of a row that stands on a trunk."""
    shared = trunk.length if trunk is not None else 0
    return RowLength(len(row.tokens) - shared, trunk, shared)
