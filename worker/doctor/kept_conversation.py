"""Plays a conversation through a KV manager of the checks' own, as the scheduler does for requests.

Owner: the inference thread.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from mlx_lm.generate import generation_stream

from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.cache.extent_store import Budget, Extent
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.file_format import FileKind, Record, decode, encode
from hearth.worker.doctor.check_context import ROOT, CheckContext
from hearth.worker.doctor.upstream_forwards import Answer, as_numbers, forced_choice
from hearth.worker.draft.draft import Draft, chain
from hearth.worker.engine.decode.decoder import Decoder, Sequence as DecodedSequence
from hearth.worker.engine.decode.sampler import TokenChoice
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap, RewindPoint
from hearth.worker.kv.quantise_kv import KVRows, LayerStates
from hearth.worker.kv.serialise_kv import (
    arrays_of,
    rows_from,
    state_from,
)
from hearth.worker.prompt.prefill_cuts import SYSTEM_STEP_MAX

CUTS_BESIDE_CHUNKS: Final = 16  # at most, of a canary: message headers
SPARE_ROWS: Final = 3  # times the last prompt: a slot, what is kept of it, what is being restored


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer, and from where its prompt was resumed."""

    answer: Answer
    position: int
    source: str  # "slot", "ram" or "none"
    is_rewound: bool  # the slot was taken back
    ends: tuple[int, ...]  # of the forwards that read the prompt, from `position` on


def bytes_needed(layers: LayerMap, depth: int, chunk: int) -> int:
    """Return what a conversation of the canary may take at most."""
    cuts = depth // min(chunk, SYSTEM_STEP_MAX) + CUTS_BESIDE_CHUNKS
    a_cut = layers.state_bytes + layers.window_bytes(min(layers.layout.window, depth))
    return SPARE_ROWS * layers.slot_bytes(depth, None) + cuts * a_cut


class KnownAnswer:
    """Drafts what is said next anyway: the `tokens` of an answer, and the last one ever after.

    `forwards` has the rows of each forward that verified; those that it drafts for have `rows`.
    """

    def __init__(self, tokens: Sequence[int], rows: int) -> None:
        self.forwards: list[int] = []
        self._tokens = [*tokens, *[tokens[-1]] * rows]
        self._rows = rows
        self._said = 0

    def take(self, tokens: Sequence[int]) -> None:
        self._said += len(tokens)

    def is_promising(self) -> bool:
        return True

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        length = min(tokens_max, self._rows - waiting)
        tokens = self._tokens[self._said : self._said + length]
        return chain(tokens, ["prediction"] * len(tokens))

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        self.forwards.append(rows)


class KeptConversation:
    """One conversation whose KV is kept. Owner: the inference thread."""

    def __init__(self, context: CheckContext, layers: LayerMap, is_exact: bool) -> None:
        assert context.canary is not None
        chunk = context.rule.chunk
        nbytes = bytes_needed(layers, context.canary.depth, chunk)
        context.needs(nbytes, "the canary's KV")
        self._context = context
        self._layers = layers
        rules = KeepRules(slots_max=2, chunk=chunk, is_exact=is_exact)
        self._kv_manager = KVManager(ROOT, layers, context.engine.new_cache, Budget(nbytes), rules)

    def ask(
        self, ids: Sequence[int], forced: Sequence[int], rows: int = 1
    ) -> Generator[None, None, KeptAnswer]:
        """Read a prompt from where it is resumed; answer it with the tokens `forced`.

        A forward verifies a draft of them where it has several `rows`.
        """
        kv_manager, keys = self._kv_manager, pack(ids)
        cuts = self._context.cuts_of(ids)
        query = PrefixQuery(keys, cuts, prefix_hashes(ROOT, keys, cuts))
        depths = {slot.number: slot.position for slot in kv_manager.slots}
        slot, plan = kv_manager.open(query, len(ids) + len(forced))
        is_rewound = plan.slot is not None and depths[plan.slot] > plan.position
        ends = []
        for cut, name in zip(cuts, query.names, strict=True):
            if cut > slot.position:
                self._context.engine.prefill(slot.cache, list(ids[slot.position : cut]))
                kv_manager.commit(slot, keys[:cut], name)
                ends.append(cut)
                yield
        answer = yield from self._decode(slot, ids, forced, rows)
        return KeptAnswer(answer, plan.position, plan.source, is_rewound, tuple(ends))

    def _decode(
        self, slot: Any, ids: Sequence[int], forced: Sequence[int], rows: int
    ) -> Generator[None, None, Answer]:
        kv_manager = self._kv_manager
        seen: list[Any] = []
        decoder = Decoder(self._context.model, generation_stream, False)
        position = slot.position
        drafter = KnownAnswer(forced, rows) if rows > 1 else None
        decoder.add(
            DecodedSequence(
                key="canary",
                cache=slot.cache,
                tokens=list(ids[:position]),
                tail=list(ids[position:]),
                choice=TokenChoice(forced_choice(forced, seen), (), None),
                tokens_max=len(forced) + (rows if drafter else 0),  # each forward has all rows
                before_forward=partial(kv_manager.grow, slot),
                drafter=drafter,
                before_draft=partial(kv_manager.grow_for_draft, slot),
                rewind_point=RewindPoint if drafter else None,
            )
        )
        yield
        returned = 0
        while returned < len(forced):
            returned += len(decoder.step())
            yield
        assert drafter is None or set(drafter.forwards) == {rows}, (drafter.forwards, rows)
        left = decoder.remove("canary", len(forced))
        assert left is not None
        kv_manager.close(slot, left.cache, pack(left.tokens), is_prefilled=True)
        return Answer(np.stack([as_numbers(row) for row in seen[: len(forced)]]))

    def give_up_slots(self) -> None:
        """Copy what the live slots hold into what is kept, and empty them."""
        for slot in self._kv_manager.slots:
            self._kv_manager.give_up(slot)

    def through_files(self) -> Generator[None]:
        """Make all that is kept a file's bytes, and what these bytes hold what is kept."""
        store = self._kv_manager.store
        for extent in list(store.extents):
            body, window, snapshot = extent.body, extent.window, extent.end.snapshot
            if isinstance(body, KVRows):
                store.set_body(extent, self._rows(extent, FileKind.ROWS, body))
            if isinstance(window, KVRows):
                kept = self._rows(extent, FileKind.WINDOW, window)
                store.set_window(extent, kept, extent.window_from)
            if isinstance(snapshot, LayerStates) and extent.end.arrival is extent:
                arrays = self._through_file(extent, FileKind.STATE, arrays_of(snapshot))
                store.set_snapshot(extent.end, state_from(arrays.arrays))
            yield

    def _rows(self, extent: Extent, kind: FileKind, rows: KVRows) -> KVRows:
        record = self._through_file(extent, kind, arrays_of(rows))
        return rows_from(record.arrays)

    def _through_file(self, extent: Extent, kind: FileKind, arrays: Any) -> Record:
        record = Record(
            root=ROOT,
            start=extent.start.name,
            end=extent.end.name,
            position=extent.start.position,
            tokens=extent.tokens,
            is_canonical=extent.is_canonical,
            kind=kind,
            arrays=arrays,
        )
        whole = np.concatenate([np.frombuffer(part, np.uint8) for part in encode(record)])
        return decode(whole, ROOT, record.name)
