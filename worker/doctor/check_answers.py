"""Checks answers against cold answers, and measures the cost of forwards that verify drafts.

The checked answers are warm (in exact and in default mode), rewound, restored, batched or drafted.
Each conversation has its own KV manager and uses it as the scheduler does.
Owner: the inference thread.
"""

import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from mlx_lm.generate import generation_stream

from hearth.worker.cache.block_hash import pack, prefix_hashes
from hearth.worker.cache.extent_store import Budget, Extent
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.file_format import FileKind, Record, decode, encode
from hearth.worker.doctor.check_context import (
    ROOT,
    Answer,
    CheckContext,
    Difference,
    LeftOut,
    Steps,
    UpstreamSequence,
    as_numbers,
    cold_answer,
    combined,
    difference,
    forced_choice,
    rounding_limit,
    timed,
)
from hearth.worker.doctor.findings import Figure
from hearth.worker.draft.draft import Draft, chain
from hearth.worker.engine.decode.decoder import Decoder, DecodingSequence as DecodedSequence
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap, RewindPoint, can_rewind
from hearth.worker.kv.quantise_kv import KVRows, LayerStates
from hearth.worker.kv.serialise_kv import arrays_of, rows_from, state_from
from hearth.worker.prompt.prefill_cuts import SYSTEM_STEP_MAX

COLD, EXACT, REWINDS, RESTORES = "logits", "exact", "rewinds", "restores"
DEFAULT, BATCHES, DRAFTS = "default", "batches", "drafts"
FORKED_TURN: Final = 2  # index of the canary's turn that is replaced by another message
LENGTHS: Final = (40, 47, 55, 61)  # prompt tokens of the sequences in a batch, to be padded
STEPS: Final = 6  # tokens decoded for each sequence
ROW_COUNTS: Final = (2, 4, 8)  # rows of a verifying forward; no forward has more
WARM_UP_STEPS: Final = 3  # first forwards of a shape, which are not counted
TIMED_FORWARDS: Final = WARM_UP_STEPS + 5
CUTS_BESIDE_CHUNKS: Final = 16  # highest number of message headers in a canary
SPARE_ROWS: Final = 3  # copies of the last prompt's KV: in the slot, kept, being restored


# ---------------------------------------------------------------- a conversation with kept KV


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer, and where its prompt resumed."""

    answer: Answer
    position: int  # position at which the prompt resumed
    source: str  # "slot", "ram" or "none"
    is_rewound: bool  # the slot was rewound
    ends: tuple[int, ...]  # end positions of the forwards that read the prompt from `position` on


def bytes_needed(layers: LayerMap, depth: int, chunk: int) -> int:
    """Return how many bytes a conversation of the canary may take at most."""
    cuts = depth // min(chunk, SYSTEM_STEP_MAX) + CUTS_BESIDE_CHUNKS
    a_cut = layers.state_bytes + layers.window_bytes(min(layers.layout.window, depth))
    return SPARE_ROWS * layers.slot_bytes(depth, None) + cuts * a_cut


class KnownAnswer:
    """Drafts the known `tokens` of an answer, and repeats the last token after them.

    A forward with a draft has `rows` rows. `forwards` lists the rows of each verifying forward.
    """

    def __init__(self, tokens: Sequence[int], rows: int) -> None:
        self.forwards: list[int] = []
        self._tokens = [*tokens, *[tokens[-1]] * rows]
        self._rows = rows
        self._taken = 0

    def take(self, tokens: Sequence[int]) -> None:
        self._taken += len(tokens)

    def is_promising(self) -> bool:
        return True

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        length = min(tokens_max, self._rows - waiting)
        tokens = self._tokens[self._taken : self._taken + length]
        return chain(tokens, ["prediction"] * len(tokens))

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        self.forwards.append(rows)


class KeptConversation:
    """One conversation with kept KV. Owner: the inference thread."""

    def __init__(self, context: CheckContext, is_exact: bool) -> None:
        """Raises: LeftOut: there are no cold answers to compare with, or no memory."""
        context.require_cold_answers()
        assert context.canary is not None
        layers, chunk = context.layers(), context.rule.chunk
        nbytes = bytes_needed(layers, context.canary.depth, chunk)
        context.require_bytes(nbytes, "the canary's KV")
        self._context = context
        self._layers = layers
        rules = KeepRules(slots_max=2, chunk=chunk, is_exact=is_exact)
        self._kv_manager = KVManager(ROOT, layers, context.engine.new_cache, Budget(nbytes), rules)

    def ask(
        self, ids: Sequence[int], forced: Sequence[int], rows: int = 1
    ) -> Generator[None, None, KeptAnswer]:
        """Read a prompt from where it resumes, and answer it with the tokens `forced`.

        With several `rows`, each forward verifies a draft of these tokens.
        """
        kv_manager, prompt_keys = self._kv_manager, pack(ids)
        cuts = self._context.rule.cuts(list(ids))
        query = PrefixQuery(prompt_keys, cuts, prefix_hashes(ROOT, prompt_keys, cuts))
        depths = {slot.number: slot.position for slot in kv_manager.slots}
        slot, plan = kv_manager.open(query, len(ids) + len(forced))
        is_rewound = plan.slot is not None and depths[plan.slot] > plan.position
        ends = []
        for cut, name in zip(cuts, query.names, strict=True):
            if cut > slot.position:
                self._context.engine.prefill(slot.cache, list(ids[slot.position : cut]))
                kv_manager.commit(slot, prompt_keys[:cut], name)
                ends.append(cut)
                yield
        answer = yield from self._decode(slot, ids, forced, rows)
        return KeptAnswer(answer, plan.position, plan.source, is_rewound, tuple(ends))

    def _decode(
        self, slot: Any, ids: Sequence[int], forced: Sequence[int], rows: int
    ) -> Generator[None, None, Answer]:
        kv_manager = self._kv_manager
        logprobs: list[Any] = []
        decoder = Decoder(self._context.model, generation_stream, False)
        position = slot.position
        drafter = KnownAnswer(forced, rows) if rows > 1 else None
        decoder.add(
            DecodedSequence(
                request_id="canary",
                cache=slot.cache,
                tokens=list(ids[:position]),
                tail=list(ids[position:]),
                sampling=SamplingParams(forced_choice(forced, logprobs), (), None),
                tokens_max=len(forced) + (rows if drafter else 0),  # room for full drafts
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
        removed = decoder.remove("canary", len(forced))
        assert removed is not None
        kv_manager.close(slot, removed.cache, pack(removed.tokens), is_prefilled=True)
        return Answer(np.stack([as_numbers(row) for row in logprobs[: len(forced)]]))

    def release_slots(self) -> None:
        """Copy the KV of the live slots into the store, and empty the slots."""
        for slot in self._kv_manager.slots:
            self._kv_manager.release_slot(slot)

    def through_files(self) -> Generator[None]:
        """Encode all kept KV as files, and replace it by the decoded bytes."""
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
        return rows_from(self._through_file(extent, kind, arrays_of(rows)).arrays)

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
        file_bytes = np.concatenate([np.frombuffer(part, np.uint8) for part in encode(record)])
        return decode(file_bytes, ROOT, record.name)


# ---------------------------------------------------------------- warm


def check_cold(context: CheckContext) -> Steps:
    """Answer each of the canary's prompts without kept KV: later checks compare with this."""
    assert context.canary is not None
    context.cold = []
    for _ in context.canary.turns:
        ids = context.prompts()[-1]
        count = context.canary.answer_tokens
        answer = yield from cold_answer(context.model, ids, context.rule.cuts(ids), count)
        context.cold.append(answer)
    odd = sum(not bool((row == row).all()) for answer in context.cold for row in answer.logprobs)
    context.report(
        "fault" if odd else "ok",
        {
            "depth": context.canary.depth,
            "tokens": sum(len(answer.logprobs) for answer in context.cold),
            "odd_tokens": odd,
        },
        f"{odd} tokens' log probabilities are no numbers" if odd else "",
    )


def check_exact(context: CheckContext) -> Steps:
    """Run the canary in exact mode, rewind it, restore it: all bits must equal the cold ones."""
    kept = KeptConversation(context, is_exact=True)
    prompts = context.prompts()
    found, lost = [], 0
    for number, ids in enumerate(prompts):
        answer = yield from kept.ask(ids, context.cold[number].tokens)
        found.append(difference(answer.answer, context.cold[number]))
        # The beginning of the previous answer is a cut of every prompt that continues it.
        begin = context.rule.cuts(prompts[number - 1])[-1:] if number else []
        lost += any(answer.position < cut in context.rule.cuts(ids) for cut in begin)
    _report_bits(context, found, lost)
    context.begin_stage(REWINDS)
    yield from _check_rewinds(context, kept, prompts)
    context.begin_stage(RESTORES)
    yield from _check_restores(context, kept, context.cold[-1])


def check_default(context: CheckContext) -> Steps:
    """Run the canary in default mode, in which prompts resume at KV that decoding wrote."""
    kept = KeptConversation(context, is_exact=False)
    prompts = context.prompts()
    parts = []
    for ids, cold in zip(prompts, context.cold, strict=True):
        warm = yield from kept.ask(ids, cold.tokens)
        parts.append(difference(warm.answer, cold))
    found = combined(parts)
    reason = str(found) if found.has_other_tokens else ""
    context.report("differs" if reason else "ok", found.figures(), reason)


def _check_rewinds(
    context: CheckContext, kept: KeptConversation, prompts: list[list[int]]
) -> Steps:
    """Replace a late turn by another message, then put the turn back: the slot is rewound twice."""
    assert context.canary is not None
    history = prompts[FORKED_TURN - 1] + context.cold[FORKED_TURN - 1].tokens
    forked = history + list(context.canary.other)
    count, cuts = context.canary.answer_tokens, context.rule.cuts(forked)
    cold = yield from cold_answer(context.model, forked, cuts, count)
    found, rewound, lost = [], 0, 0
    for ids, answer in ((forked, cold), (prompts[FORKED_TURN], context.cold[FORKED_TURN])):
        warm = yield from kept.ask(ids, answer.tokens)
        found.append(difference(warm.answer, answer))
        rewound += warm.is_rewound
        lost += warm.position == 0
    _report_bits(context, found, lost, {"in_place": rewound})


def _check_restores(context: CheckContext, kept: KeptConversation, expected: Answer) -> Steps:
    """Copy all KV out of the live slots and back, directly and through the bytes of files."""
    ids, forced = context.prompts()[-1], context.cold[-1].tokens
    found, lost = [], 0
    for is_filed in (False, True):
        kept.release_slots()
        if is_filed:
            yield from kept.through_files()
        warm = yield from kept.ask(ids, forced)
        found.append(difference(warm.answer, expected))
        lost += warm.source != "ram" or bool(warm.ends)
    _report_bits(context, found, lost)


def _report_bits(
    context: CheckContext,
    parts: list[Difference],
    lost: int,
    more: dict[str, Figure] | None = None,
) -> None:
    """Report a fault if an answer's bits differ, or if kept tokens were read again."""
    found = combined(parts)
    figures = {**found.figures(), "read_anew": lost, **(more or {})}
    reasons = [] if found.is_none else [str(found)]
    reasons += [f"{lost} prompts were read anew that are kept"] if lost else []
    context.report("fault" if reasons else "ok", figures, "; ".join(reasons))


# ---------------------------------------------------------------- in a batch


def check_batches(context: CheckContext) -> Steps:
    """Decode four sequences alone, then in one batch: the answers must not depend on the batch.

    Each prompt is also read in two forwards instead of one. A batch may change the answer no more
    than this split does.
    """
    if not context.engine.decoder.is_mergeable:
        raise LeftOut("this model's sequences do not share forwards")
    row_bytes = context.layers().slot_bytes(max(LENGTHS) + STEPS, None)
    context.require_bytes(len(LENGTHS) * 2 * row_bytes, "a batch of four")
    assert context.canary is not None
    ids = [token for turn in context.canary.turns for token in turn]
    ids *= 1 + (max(LENGTHS) + len(LENGTHS)) // len(ids)
    prompts = [ids[number : number + length] for number, length in enumerate(LENGTHS)]
    alone, apart = [], []
    for ids in prompts:
        end = len(ids) - 1
        whole = yield from cold_answer(context.model, ids, [end], STEPS)
        cut = yield from cold_answer(context.model, ids, [end // 2, end], STEPS, whole.tokens)
        alone.append(whole)
        apart.append(difference(cut, whole))
    batched = yield from _batched(context, prompts, alone)
    found = combined([difference(a, b) for a, b in zip(batched, alone, strict=True)])
    limit = rounding_limit(context.dtype, combined(apart).relative)
    is_fault = not found.relative <= limit
    context.report(
        "fault" if is_fault else "ok",
        {"rows": len(prompts), "rounding_limit": limit, **found.figures()},
        f"{len(prompts)} rows in a batch and each alone: {found}" if is_fault else "",
    )


def _batched(
    context: CheckContext, prompts: list[list[int]], alone: list[Answer]
) -> Generator[None, None, list[Answer]]:
    """Return the answer of each sequence in one batch, forced to the tokens of `alone`."""
    decoder = Decoder(context.model, generation_stream, True)
    logprobs: list[list[Any]] = [[] for _ in prompts]
    for number, ids in enumerate(prompts):
        cache = context.engine.new_cache()
        context.engine.prefill(cache, list(ids[:-1]))
        yield
        sampler = forced_choice(alone[number].tokens, logprobs[number])
        decoder.add(
            DecodedSequence(
                request_id=str(number),
                cache=cache,
                tokens=list(ids[:-1]),
                tail=list(ids[-1:]),
                sampling=SamplingParams(sampler, (), None),
                tokens_max=1 << 20,
            )
        )
        yield
    while min(map(len, logprobs)) < STEPS:
        decoder.step()
        yield
    shared = max(map(len, decoder.batch_request_ids), default=0)
    for number in range(len(prompts)):
        decoder.remove(str(number))
    if shared < len(prompts):
        raise LeftOut(f"only {shared} of {len(prompts)} sequences shared a forward")
    return [Answer(np.stack([as_numbers(row) for row in rows[:STEPS]])) for rows in logprobs]


# ---------------------------------------------------------------- drafted


def check_drafts(context: CheckContext) -> Steps:
    """Verify the canary's answers as drafts: each row of a forward must choose the same token.

    The answers were decoded token by token. A forward of several rows may choose other tokens
    because of rounding, and then answers with drafts differ from plain decoding.
    """
    context.require_cold_answers()
    if not can_rewind(context.engine.probe()):
        raise LeftOut("the model keeps what cannot be taken back, so that nothing is drafted")
    costs = yield from _row_costs(context)
    found = yield from _verified(context)
    all_rows = combined(list(found.values()))
    figures: dict[str, Figure] = {f"cost_{rows}": cost for rows, cost in costs.items()}
    reasons = [f"{rows} rows: {part}" for rows, part in found.items() if part.has_other_tokens]
    context.report("differs" if reasons else "ok", figures | all_rows.figures(), "; ".join(reasons))


def costs_in(figures: Mapping[str, Figure]) -> dict[int, float]:
    """Return the cost of forwards by their number of rows, from the check's figures."""
    costs = {rows: figures.get(f"cost_{rows}") for rows in (1, *ROW_COUNTS)}
    return {rows: cost for rows, cost in costs.items() if isinstance(cost, float)}


def _row_costs(context: CheckContext) -> Generator[None, None, dict[int, float]]:
    """Return the cost of a forward after the canary, by number of rows; one row costs 1."""
    ids = context.prompts()[-1]
    fed = TIMED_FORWARDS * sum((1, *ROW_COUNTS))
    context.require_bytes(context.layers().slot_bytes(len(ids) + fed, None), "the canary's KV")
    sequence = UpstreamSequence(context.model)
    yield from sequence.read(ids, [*context.rule.cuts(ids), len(ids)])
    rounds: list[dict[int, float]] = []
    for _ in range(TIMED_FORWARDS):
        times: dict[int, float] = {}
        for rows in (1, *ROW_COUNTS):
            (times[rows],) = yield from timed(sequence.answer(ids[:rows], 1))
        rounds.append(times)
    return median_costs(rounds[WARM_UP_STEPS:])


def median_costs(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the cost by number of rows, from several rounds of all numbers; one row costs 1.

    Each time is divided by the time of one row in the same round, because other work on the machine
    slows both.
    """
    return {
        rows: statistics.median(times[rows] / times[1] for times in rounds) for rows in rounds[0]
    }


def _verified(context: CheckContext) -> Generator[None, None, dict[int, Difference]]:
    """Return the difference from decoding token by token, by the number of rows of a forward."""
    kept = KeptConversation(context, is_exact=True)
    found: dict[int, list[Difference]] = {rows: [] for rows in ROW_COUNTS}
    for ids, cold in zip(context.prompts(), context.cold, strict=True):
        for rows in ROW_COUNTS:
            warm = yield from kept.ask(ids, cold.tokens, rows)
            found[rows].append(difference(_drafted(warm.answer), _drafted(cold)))
    return {rows: combined(parts) for rows, parts in found.items()}


def _drafted(answer: Answer) -> Answer:
    """Return an answer without its first token, which the prompt's forward decodes."""
    return Answer(np.asarray(answer.logprobs[1:]))
