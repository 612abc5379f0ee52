"""Tells whether a prompt goes on with a line, and notes what that means for what the line has read.

Some clients send the last messages of a prompt otherwise in the next one. Nobody goes on from what
was read of such an end: kept as if somebody did, it pushes out what the next prompt goes on from.
"""

import time
from typing import Final

from hearth.worker.cache.block_hash import common_length
from hearth.worker.cache.conversation_priority import LinePriorities, LinePriority
from hearth.worker.cache.extent_store import ExtentStore, Joint, path_to
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan

REWRITTEN_MAX: Final = 1_024  # tokens at a line's end that its next prompt may have otherwise


def goes_on(store: ExtentStore, line: LinePriority, plan: ResumePlan, query: PrefixQuery) -> bool:
    """Return whether a prompt extends what the line last read, or is the same with another end.

    With another end it has to share more than it has otherwise, system and tools left out: all
    that a client asks begins with these.
    """
    tip = _tip(store, line)
    if tip is None or not plan.path or line.family != query.family:
        return False
    if _has(tip, plan):
        return True
    if line.is_running or query.is_side:
        return False
    shared = _shared(tip, plan, query)
    return tip.position - shared <= min(REWRITTEN_MAX, shared - query.system_end)


def leave_out_end(store: ExtentStore, line: LinePriority, plan: ResumePlan) -> None:
    """Note what a prompt that goes on with the line leaves out of what it last read."""
    tip = _tip(store, line)
    if tip is None or _has(tip, plan):
        return
    todo = [tip]
    while todo:
        joint = todo.pop()
        joint.is_left_out = True
        todo += [extent.end for extent in joint.leaving]
    line.tip = None


def take_over_path(
    line: LinePriority, plan: ResumePlan, query: PrefixQuery, now: float, ttl_s: float
) -> None:
    """Give the extents that are resumed from to the line, unless a likelier one has them.

    What came from disk is not known yet as system and tools.
    """
    mine = line.likelihood(now, ttl_s)
    for extent in plan.path:
        if extent.line.likelihood(now, ttl_s) <= mine:
            extent.line = line
        extent.end.is_in_head |= extent.end.position <= query.system_end
        extent.end.is_left_out = False
    line.resumed_at, line.read_to = plan.position, len(query.tokens)


def _has(tip: Joint, plan: ResumePlan) -> bool:
    """Whether the prompt has all that ends at `tip`."""
    return tip.position <= plan.position and tip.arrival in plan.path


def _shared(tip: Joint, plan: ResumePlan, query: PrefixQuery) -> int:
    """Return how many tokens the prompt has in common with the one that ends at `tip`."""
    kept = {extent.end for extent in plan.path}
    rest = [extent for extent in path_to(tip) if extent.end not in kept]
    position = rest[0].start.position if rest else tip.position
    for extent in rest:
        count = common_length(extent.tokens, query.tokens[position:])
        position += count
        if count < len(extent.tokens):
            break
    return position


def _tip(store: ExtentStore, line: LinePriority) -> Joint | None:
    return store.joint(line.tip) if line.tip is not None else None


def line_of(
    store: ExtentStore,
    lines: LinePriorities,
    plan: ResumePlan,
    query: PrefixQuery,
    there: LinePriority | None,
) -> LinePriority:
    """Return the line that a request with this plan goes on with, or a new one.

    `there` is the line of the slot that it goes on in, if it does.
    """
    now, line = time.monotonic(), there
    turns = 1 + sum(extent.end.is_prompt_end for extent in plan.path)
    if plan.path:
        line, last = None, plan.path[-1].line
        if goes_on(store, last, plan, query):
            leave_out_end(store, last, plan)
            line = last
    if line is None or line.is_running or line.family != query.family:
        return lines.open(now, turns, query.family, query.is_side)
    lines.begin_turn(line, now, max(turns, line.turns + 1))
    return line
