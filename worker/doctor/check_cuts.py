"""Checks where prompts are cut, and what a cut changes against one whole forward."""

from collections.abc import Sequence

from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.doctor.check_context import CheckContext, Steps
from hearth.worker.doctor.difference import difference, rounding_limit
from hearth.worker.doctor.findings import Figure, Verdict
from hearth.worker.doctor.upstream_forwards import Forwards, UpstreamSequence, cold_answer

NAME = "cuts"


def check_cuts(context: CheckContext) -> Steps:
    """Read the canary's last prompt by the engine, by mlx-lm in the same cuts, and in one forward.

    The first two must agree to the bit, and cuts must be functions of the tokens alone: else what
    is kept of one prompt is not what another's prefill would write.
    """
    context.begin(NAME)
    context.needs_cold()
    prompts = context.prompts()
    faults = wrong_cuts(prompts, [context.cuts_of(ids) for ids in prompts], context.rule.grid)
    ids, cold = _shortened(context, prompts)
    cuts = context.cuts_of(ids)
    forced = cold
    by_cuts = yield from cold_answer(context.model, ids, cuts, len(forced), forced)
    own = yield from _engines_answer(context, ids, cuts, forced)
    own_difference = difference(own, by_cuts)
    if not own_difference.is_none:
        faults.append(f"the engine's forwards are not mlx-lm's: {own_difference}")
    whole = yield from cold_answer(context.model, ids, cuts[-1:], len(forced), forced)
    found = difference(by_cuts, whole)
    context.noise = found.relative
    limit = rounding_limit(context.dtype)
    figures: dict[str, Figure] = {
        "depth": len(ids),
        "cuts": len(cuts),
        "engine_bits_equal": own_difference.is_none,
        "rounding_limit": limit,
        **found.figures(),
    }
    verdict: Verdict = "ok"
    reasons = faults
    if faults:
        verdict = "fault"
    elif not found.relative <= limit:
        verdict, reasons = "differs", [f"cuts and one whole forward: {found}"]
    context.tell(verdict, figures, "; ".join(reasons))


def wrong_cuts(
    prompts: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]], grid: PrefillGrid
) -> list[str]:
    """Return what is wrong with the `cuts` of prompts that each go on from the one before."""
    faults = []
    for ids, own in zip(prompts, cuts, strict=True):
        missing = sorted(set(grid.points(len(ids))) - set(own))
        if missing:
            faults.append(f"a prompt of {len(ids)} tokens is not cut at {missing[0]}")
        if list(own) != sorted(set(own)) or (own and not 0 < own[0] <= own[-1] < len(ids)):
            faults.append(f"the cuts of a prompt of {len(ids)} tokens do not ascend in it")
    for number in range(1, len(prompts)):
        shorter, longer = cuts[number - 1], set(cuts[number])
        lost = [cut for cut in shorter[:-1] if cut not in longer]
        begun = len(prompts[number - 1])
        added = [cut for cut in longer if cut < begun and cut not in shorter]
        if lost or len(added) > 1:
            faults.append(
                f"a prompt of {begun} tokens is cut at {(lost or added)[0]}, and one that goes on "
                "from it is cut otherwise"
            )
    return faults


def _shortened(context: CheckContext, prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Return the last prompt that one forward may read, and its cold answer's tokens.

    A forward of seconds would hold up a request, and the display of a Mac.
    """
    most = max(context.forward_tokens_max, context.rule.chunk + 1)
    fits = [number for number, ids in enumerate(prompts) if len(ids) <= most]
    number = fits[-1] if fits else 0
    ids = prompts[number]
    if not fits:
        ids = ids[:most]
    return ids, context.cold[number].tokens


def _engines_answer(
    context: CheckContext, ids: list[int], cuts: list[int], forced: list[int]
) -> Forwards:
    """Return what is answered where the engine reads the prompt."""
    sequence = UpstreamSequence(context.model)
    start = 0
    for cut in cuts:
        context.engine.prefill(sequence.cache, ids[start:cut])
        start = cut
        yield
    return (yield from sequence.answer(ids[start:], len(forced), forced))
