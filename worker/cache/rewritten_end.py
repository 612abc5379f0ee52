"""Tells a conversation whose end was rewritten from another conversation.

Some clients send the last messages of a prompt otherwise in the next one. Nobody goes on from what
was read of such an end: kept as if somebody did, it pushes out what the next prompt goes on from.
"""

from typing import Final

from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.extent_store import ExtentStore, Joint
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan

REWRITTEN_MAX: Final = 1_024  # tokens at a line's end that its next prompt may have otherwise


def goes_on(store: ExtentStore, line: LinePriority, plan: ResumePlan, query: PrefixQuery) -> bool:
    """Return whether a prompt extends what the line last read, or is the same with another end.

    With another end it has to share more than it has otherwise, system and tools left out: all
    that a client asks begins with these.
    """
    tip = _tip(store, line)
    if tip is None or not plan.path:
        return False
    if tip.arrival in plan.path:
        return True
    if line.is_running or line.family != query.family or query.is_side:
        return False
    shared = _shared(tip, plan)
    return tip.position - shared <= min(REWRITTEN_MAX, shared - query.system_end)


def leave_out_end(store: ExtentStore, line: LinePriority, plan: ResumePlan) -> None:
    """Note what a prompt that goes on with the line leaves out of what it last read."""
    tip = _tip(store, line)
    if tip is None or tip.arrival in plan.path:
        return
    todo = [tip]
    while todo:
        joint = todo.pop()
        joint.is_left_out = True
        todo += [extent.end for extent in joint.leaving]
    line.tip = None


def _shared(tip: Joint, plan: ResumePlan) -> int:
    """Return how many tokens the prompt has in common with the one that ends at `tip`."""
    joint, kept = tip, {extent.end for extent in plan.path}
    while joint not in kept:
        if joint.arrival is None:
            return 0
        joint = joint.arrival.start
    return min(tip.position, plan.matched) if joint is plan.path[-1].end else joint.position


def _tip(store: ExtentStore, line: LinePriority) -> Joint | None:
    return store.joint(line.tip) if line.tip is not None else None
