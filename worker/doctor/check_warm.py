"""Checks warm answers against cold ones: in exact mode, by default, rewound and restored."""

from typing import Final

from hearth.worker.doctor.check_context import CheckContext, Steps
from hearth.worker.doctor.findings import Figure
from hearth.worker.doctor.kept_conversation import KeptConversation
from hearth.worker.doctor.upstream_forwards import (
    Answer,
    Difference,
    cold_answer,
    difference,
    together,
)

COLD, EXACT, REWINDS, RESTORES = "logits", "exact", "rewinds", "restores"
DEFAULT: Final = "default"
FORKED_TURN: Final = 2  # of the canary's, counted from 0: another one is asked in its place
_NAN: Final = "log probabilities are no numbers"


def check_cold(context: CheckContext) -> Steps:
    """Answer each of the canary's prompts with nothing kept; all that follows compares with it."""
    context.begin(COLD)
    assert context.canary is not None
    context.cold = []
    for _ in context.canary.turns:
        ids = context.prompts()[-1]
        count = context.canary.answer_tokens
        answer = yield from cold_answer(context.model, ids, context.cuts_of(ids), count)
        context.cold.append(answer)
    odd = sum(not bool((row == row).all()) for each in context.cold for row in each.logprobs)
    figures: dict[str, Figure] = {
        "depth": context.canary.depth,
        "tokens": sum(len(each.logprobs) for each in context.cold),
        "odd_tokens": odd,
    }
    context.tell("fault" if odd else "ok", figures, f"{odd} tokens' {_NAN}" if odd else "")


def check_exact(context: CheckContext) -> Steps:
    """Play the canary in exact mode, take it back, restore it: each must be cold to the bit."""
    context.begin(EXACT)
    kept = _conversation(context, is_exact=True)
    prompts = context.prompts()
    found, lost = [], 0
    for number, ids in enumerate(prompts):
        answer = yield from kept.ask(ids, context.cold[number].tokens)
        found.append(difference(answer.answer, context.cold[number]))
        # Where the answer before begins is a cut of every prompt that goes on from there.
        begin = context.cuts_of(prompts[number - 1])[-1:] if number else []
        lost += any(answer.position < cut in context.cuts_of(ids) for cut in begin)
    _tell_bits(context, found, lost)
    context.begin(REWINDS)
    yield from _check_rewinds(context, kept, prompts)
    context.begin(RESTORES)
    yield from _check_restores(context, kept, context.cold[-1])


def check_default(context: CheckContext) -> Steps:
    """Play the canary by default, where answers go on from what decoding wrote."""
    context.begin(DEFAULT)
    kept = _conversation(context, is_exact=False)
    prompts = context.prompts()
    parts = []
    for ids, cold in zip(prompts, context.cold, strict=True):
        warm = yield from kept.ask(ids, cold.tokens)
        parts.append(difference(warm.answer, cold))
    found = together(parts)
    reason = str(found) if found.has_other_tokens else ""
    context.tell("differs" if reason else "ok", found.figures(), reason)


def _conversation(context: CheckContext, is_exact: bool) -> KeptConversation:
    context.needs_cold()
    return KeptConversation(context, context.layers(), is_exact)


def _check_rewinds(
    context: CheckContext, kept: KeptConversation, prompts: list[list[int]]
) -> Steps:
    """Ask something else in the place of a late turn, twice: the slot is taken back each time."""
    assert context.canary is not None
    history = prompts[FORKED_TURN - 1] + context.cold[FORKED_TURN - 1].tokens
    forked = history + list(context.canary.other)
    count, cuts = context.canary.answer_tokens, context.cuts_of(forked)
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
