"""Checks that drafts change no token, and measures what forwards that verify them cost."""

import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Final

import numpy as np

from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.findings import Figure
from hearth.worker.doctor.kept_conversation import KeptConversation
from hearth.worker.doctor.upstream_forwards import (
    Answer,
    Difference,
    UpstreamSequence,
    difference,
    together,
)
from hearth.worker.kv.layer_adapters import can_rewind

NAME: Final = "drafts"
ROW_COUNTS: Final = (2, 4, 8)  # of a forward that verifies; none has more
WARM_UP_STEPS: Final = 3  # the first forwards of a shape
TIMED_FORWARDS: Final = WARM_UP_STEPS + 5


def check_drafts(context: CheckContext) -> Steps:
    """Verify the canary's answers as drafts that are all right: each row must choose its token.

    The answers were decoded token by token; what a forward of several rows chooses in their place
    may differ by rounding, and then drafts say other things than plain decoding.
    """
    context.begin(NAME)
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
    yield from sequence.read(ids, [*context.cuts_of(ids), len(ids)])
    rounds: list[dict[int, float]] = []
    for _ in range(TIMED_FORWARDS):
        times = {}
        for rows in (1, *ROW_COUNTS):
            times[rows] = yield from timed_forward(sequence, ids[:rows])
        rounds.append(times)
    return median_costs(rounds[WARM_UP_STEPS:])


def timed_forward(sequence: UpstreamSequence, ids: Sequence[int]) -> Generator[None, None, float]:
    """Return the seconds of one forward of the tokens `ids`, behind what the sequence holds."""
    seconds, began = 0.0, time.perf_counter()
    for _ in sequence.answer(ids, 1):
        seconds = time.perf_counter() - began
        yield
    return seconds


def median_costs(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return what rows cost, one being 1, from several rounds of all of them.

    Each round is held to its own time of one row: what else the machine does, it does to both.
    """
    return {
        rows: statistics.median(times[rows] / times[1] for times in rounds) for rows in rounds[0]
    }


def _verified(context: CheckContext) -> Generator[None, None, dict[int, Difference]]:
    """Return, by the rows of a forward, how far its log probabilities are from one by one."""
    kept = KeptConversation(context, context.layers(), is_exact=True)
    found: dict[int, list[Difference]] = {rows: [] for rows in ROW_COUNTS}
    for ids, cold in zip(context.prompts(), context.cold, strict=True):
        for rows in ROW_COUNTS:
            warm = yield from kept.ask(ids, cold.tokens, rows)
            found[rows].append(difference(_drafted(warm.answer), _drafted(cold)))
    return {rows: together(parts) for rows, parts in found.items()}


def _drafted(answer: Answer) -> Answer:
    """Return an answer without its first token, which the prompt's own forward says."""
    return Answer(np.asarray(answer.logprobs[1:]))
