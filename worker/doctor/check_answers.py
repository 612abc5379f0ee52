"""Checks answers against cold ones, and measures what forwards that verify drafts cost.

The answers are warm, in exact mode and by default, rewound, restored, in a batch with others, and
drafted. A conversation is played through a KV manager of the checks' own, as the scheduler does.
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
    difference,
    forced_choice,
    rounding_limit,
    timed,
    together,
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
FORKED_TURN: Final = 2  # of the canary's, counted from 0: another one is asked in its place
LENGTHS: Final = (40, 47, 55, 61)  # tokens of the sequences that share a batch: it pads to one
STEPS: Final = 6  # tokens that each of them says
ROW_COUNTS: Final = (2, 4, 8)  # of a forward that verifies; none has more
WARM_UP_STEPS: Final = 3  # the first forwards of a shape
TIMED_FORWARDS: Final = WARM_UP_STEPS + 5
CUTS_BESIDE_CHUNKS: Final = 16  # at most, of a canary: message headers
SPARE_ROWS: Final = 3  # times the last prompt: a slot, what is kept of it, what is being restored


# ---------------------------------------------------------------- a conversation whose KV is kept


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

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        self.forwards.append(rows)


class KeptConversation:
    """One conversation whose KV is kept. Owner: the inference thread."""

    def __init__(self, context: CheckContext, is_exact: bool) -> None:
        """Raises: LeftOut: there is nothing to compare with, or no room."""
        context.needs_cold()
        assert context.canary is not None
        layers, chunk = context.layers(), context.rule.chunk
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
        cuts = self._context.rule.cuts(list(ids))
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
                request_id="canary",
                cache=slot.cache,
                tokens=list(ids[:position]),
                tail=list(ids[position:]),
                sampling=SamplingParams(forced_choice(forced, seen), (), None),
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
            self._kv_manager.release_slot(slot)

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
        whole = np.concatenate([np.frombuffer(part, np.uint8) for part in encode(record)])
        return decode(whole, ROOT, record.name)


# ---------------------------------------------------------------- warm


def check_cold(context: CheckContext) -> Steps:
    """Answer each of the canary's prompts with nothing kept; all that follows compares with it."""
    assert context.canary is not None
    context.cold = []
    for _ in context.canary.turns:
        ids = context.prompts()[-1]
        count = context.canary.answer_tokens
        answer = yield from cold_answer(context.model, ids, context.rule.cuts(ids), count)
        context.cold.append(answer)
    odd = sum(not bool((row == row).all()) for each in context.cold for row in each.logprobs)
    context.tell(
        "fault" if odd else "ok",
        {
            "depth": context.canary.depth,
            "tokens": sum(len(each.logprobs) for each in context.cold),
            "odd_tokens": odd,
        },
        f"{odd} tokens' log probabilities are no numbers" if odd else "",
    )


def check_exact(context: CheckContext) -> Steps:
    """Play the canary in exact mode, take it back, restore it: each must be cold to the bit."""
    kept = KeptConversation(context, is_exact=True)
    prompts = context.prompts()
    found, lost = [], 0
    for number, ids in enumerate(prompts):
        answer = yield from kept.ask(ids, context.cold[number].tokens)
        found.append(difference(answer.answer, context.cold[number]))
        # Where the answer before begins is a cut of every prompt that goes on from there.
        begin = context.rule.cuts(prompts[number - 1])[-1:] if number else []
        lost += any(answer.position < cut in context.rule.cuts(ids) for cut in begin)
    _tell_bits(context, found, lost)
    context.begin(REWINDS)
    yield from _check_rewinds(context, kept, prompts)
    context.begin(RESTORES)
    yield from _check_restores(context, kept, context.cold[-1])


def check_default(context: CheckContext) -> Steps:
    """Play the canary by default, where answers go on from what decoding wrote."""
    kept = KeptConversation(context, is_exact=False)
    prompts = context.prompts()
    parts = []
    for ids, cold in zip(prompts, context.cold, strict=True):
        warm = yield from kept.ask(ids, cold.tokens)
        parts.append(difference(warm.answer, cold))
    found = together(parts)
    reason = str(found) if found.has_other_tokens else ""
    context.tell("differs" if reason else "ok", found.figures(), reason)


def _check_rewinds(
    context: CheckContext, kept: KeptConversation, prompts: list[list[int]]
) -> Steps:
    """Ask something else in the place of a late turn, twice: the slot is taken back each time."""
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
    _tell_bits(context, found, lost, {"in_place": rewound})


def _check_restores(context: CheckContext, kept: KeptConversation, expected: Answer) -> Steps:
    """Copy all out of the live slots, and in again; once more through the bytes of files."""
    ids, forced = context.prompts()[-1], context.cold[-1].tokens
    found, lost = [], 0
    for is_filed in (False, True):
        kept.give_up_slots()
        if is_filed:
            yield from kept.through_files()
        warm = yield from kept.ask(ids, forced)
        found.append(difference(warm.answer, expected))
        lost += warm.source != "ram" or bool(warm.ends)
    _tell_bits(context, found, lost)


def _tell_bits(
    context: CheckContext,
    parts: list[Difference],
    lost: int,
    more: dict[str, Figure] | None = None,
) -> None:
    """Tell a fault where an answer is not the expected one to the bit, or was read anew."""
    found = together(parts)
    figures = {**found.figures(), "read_anew": lost, **(more or {})}
    reasons = [] if found.is_none else [str(found)]
    reasons += [f"{lost} prompts were read anew that are kept"] if lost else []
    context.tell("fault" if reasons else "ok", figures, "; ".join(reasons))


# ---------------------------------------------------------------- in a batch


def check_batches(context: CheckContext) -> Steps:
    """Decode four sequences alone, then in one batch: what each says may not depend on that.

    Each is also read in two forwards instead of one: a batch may change no more than that rounds.
    """
    if not context.engine.decoder.is_mergeable:
        raise LeftOut("this model's sequences do not share forwards")
    row_bytes = context.layers().slot_bytes(max(LENGTHS) + STEPS, None)
    context.needs(len(LENGTHS) * 2 * row_bytes, "a batch of four")
    assert context.canary is not None
    ids = [token for turn in context.canary.turns for token in turn]
    ids *= 1 + (max(LENGTHS) + len(LENGTHS)) // len(ids)
    prompts = [ids[number : number + length] for number, length in enumerate(LENGTHS)]
    alone, apart = [], []
    for ids in prompts:
        end = len(ids) - 1
        one = yield from cold_answer(context.model, ids, [end], STEPS)
        two = yield from cold_answer(context.model, ids, [end // 2, end], STEPS, one.tokens)
        alone.append(one)
        apart.append(difference(two, one))
    batched = yield from _batched(context, prompts, alone)
    found = together([difference(one, other) for one, other in zip(batched, alone, strict=True)])
    limit = rounding_limit(context.dtype, together(apart).relative)
    is_fault = not found.relative <= limit
    context.tell(
        "fault" if is_fault else "ok",
        {"rows": len(prompts), "rounding_limit": limit, **found.figures()},
        f"{len(prompts)} rows in a batch and each alone: {found}" if is_fault else "",
    )


def _batched(
    context: CheckContext, prompts: list[list[int]], alone: list[Answer]
) -> Generator[None, None, list[Answer]]:
    """Return what each sequence says in one batch, given the tokens that it said alone."""
    decoder = Decoder(context.model, generation_stream, True)
    seen: list[list[Any]] = [[] for _ in prompts]
    for number, ids in enumerate(prompts):
        cache = context.engine.new_cache()
        context.engine.prefill(cache, list(ids[:-1]))
        yield
        sampler = forced_choice(alone[number].tokens, seen[number])
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
    while min(map(len, seen)) < STEPS:
        decoder.step()
        yield
    shared = max(map(len, decoder.batch_request_ids), default=0)
    for number in range(len(prompts)):
        decoder.remove(str(number))
    if shared < len(prompts):
        raise LeftOut(f"only {shared} of {len(prompts)} sequences shared a forward")
    return [Answer(np.stack([as_numbers(row) for row in rows[:STEPS]])) for rows in seen]


# ---------------------------------------------------------------- drafted


def check_drafts(context: CheckContext) -> Steps:
    """Verify the canary's answers as drafts that are all right: each row must choose its token.

    The answers were decoded token by token; what a forward of several rows chooses in their place
    may differ by rounding, and then drafts say other things than plain decoding.
    """
    context.needs_cold()
    if not can_rewind(context.engine.probe()):
        raise LeftOut("the model keeps what cannot be taken back, so that nothing is drafted")
    costs = yield from _row_costs(context)
    found = yield from _verified(context)
    all_rows = together(list(found.values()))
    figures: dict[str, Figure] = {f"cost_{rows}": cost for rows, cost in costs.items()}
    reasons = [f"{rows} rows: {each}" for rows, each in found.items() if each.has_other_tokens]
    context.tell("differs" if reasons else "ok", figures | all_rows.figures(), "; ".join(reasons))


def costs_in(figures: Mapping[str, Figure]) -> dict[int, float]:
    """Return what forwards cost by their rows, from the check's figures."""
    costs = {rows: figures.get(f"cost_{rows}") for rows in (1, *ROW_COUNTS)}
    return {rows: cost for rows, cost in costs.items() if isinstance(cost, float)}


def _row_costs(context: CheckContext) -> Generator[None, None, dict[int, float]]:
    """Return what a forward of several tokens costs behind the canary, one token being 1."""
    ids = context.prompts()[-1]
    fed = TIMED_FORWARDS * sum((1, *ROW_COUNTS))
    context.needs(context.layers().slot_bytes(len(ids) + fed, None), "the canary's KV")
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
    """Return what rows cost, one being 1, from several rounds of all of them.

    Each round is held to its own time of one row: what else the machine does, it does to both.
    """
    return {
        rows: statistics.median(times[rows] / times[1] for times in rounds) for rows in rounds[0]
    }


def _verified(context: CheckContext) -> Generator[None, None, dict[int, Difference]]:
    """Return, by the rows of a forward, how far its log probabilities are from one by one."""
    kept = KeptConversation(context, is_exact=True)
    found: dict[int, list[Difference]] = {rows: [] for rows in ROW_COUNTS}
    for ids, cold in zip(context.prompts(), context.cold, strict=True):
        for rows in ROW_COUNTS:
            warm = yield from kept.ask(ids, cold.tokens, rows)
            found[rows].append(difference(_drafted(warm.answer), _drafted(cold)))
    return {rows: together(parts) for rows, parts in found.items()}


def _drafted(answer: Answer) -> Answer:
    """Return an answer without its first token, which the prompt's own forward says."""
    return Answer(np.asarray(answer.logprobs[1:]))
