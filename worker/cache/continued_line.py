"""Finds the line of a prompt's conversation, and notes what the prompt means for what it has read.

Some clients send the last messages of a prompt otherwise in the next one. Nobody goes on from what
was read of such an end: kept as if somebody did, it pushes out what the next prompt goes on from.
"""

import time

from hearth.worker.cache.conversation_priority import LinePriorities, LinePriority
from hearth.worker.cache.extent_store import ExtentStore, Joint
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan


def line_of(
    store: ExtentStore,
    lines: LinePriorities,
    plan: ResumePlan,
    query: PrefixQuery,
    there: LinePriority | None,
) -> LinePriority:
    """Begin a turn of the line of the prompt's conversation, and return it.

    That is the line of what it goes on from: of its own number or, in its family, of whose last
    prompt it has all (the sessions are not told of raw prompts, nor of those that were broken off).
    Where nothing is left of such a line it begins anew. `there` is the line of the slot that it
    goes on in, if it does.
    """
    asked, turns = query.conversation, 1 + sum(extent.end.is_prompt_end for extent in plan.path)
    if plan.path:
        last = plan.path[-1].line
        tip = _tip(store, last)
        is_its = tip is not None and (_has(tip, plan) or last.number == asked.number != 0)
        there = last if is_its else None
    if there is None or there.is_running or there.family != asked.family:
        return lines.open(time.monotonic(), turns, asked)
    lines.go_on(there, time.monotonic(), turns)
    if plan.path:  # else the prompt has all that its slot holds
        _leave_out_end(store, there, plan)
    return there


def _leave_out_end(store: ExtentStore, line: LinePriority, plan: ResumePlan) -> None:
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


def _tip(store: ExtentStore, line: LinePriority) -> Joint | None:
    return store.joint(line.tip) if line.tip is not None else None
