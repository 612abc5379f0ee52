"""Finds kept KV that nothing has used for longer than a time to live."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hearth.worker.cache.conversation_priority import SPONSOR_SILENT_S, LinePriority
from hearth.worker.cache.extent_store import Extent, ExtentStore, Joint


@dataclass(frozen=True, slots=True)
class Expired:
    """What is out of date at one moment, and when something may be next.

    Invariant: what hangs from an expired extent has expired too. Immutable.
    """

    extents: tuple[Extent, ...]  # children before their parents
    next_at: float  # nothing else expires before; infinity where nothing will


def find_expired(
    store: ExtentStore, standing: Iterable[tuple[Joint, float]], now: float, ttl_s: float
) -> Expired:
    """Return the extents that no line and no slot has used for `ttl_s`; none that is pinned.

    `standing` are the joints at which slots stand, with when each was used. An extent is as
    young as the youngest that hangs from it: a trunk stays as long as one of its branches. A line
    that waits for its sub-agents is as young as they are.
    """
    assert ttl_s > 0, ttl_s
    lines = _used_lines({extent.line for extent in store.extents})
    used_at: dict[Extent, float] = {}
    for joint, at in standing:
        if joint.arrival is not None:
            used_at[joint.arrival] = max(at, used_at.get(joint.arrival, -math.inf))
    expired, next_at = [], math.inf
    for extent in sorted(store.extents, key=lambda extent: -extent.end.position):
        last = max(used_at.get(extent, -math.inf), _own_use(extent, lines))
        before = extent.start.arrival
        if before is not None:
            used_at[before] = max(last, used_at.get(before, -math.inf))
        if last + ttl_s <= now:
            expired.append(extent)
        else:
            next_at = min(next_at, last + ttl_s)
    return Expired(tuple(expired), next_at)


def _used_lines(lines: Iterable[LinePriority]) -> dict[LinePriority, float]:
    """Return when each line was used last, itself or by those that it waits for."""
    used_at: dict[LinePriority, float] = {}
    for line in lines:
        at = math.inf if line.is_running else line.used_at
        used_at[line] = max(at, used_at.get(line, -math.inf))
        if (waiting := line.sponsor) is not None:
            at = min(at, waiting.ended_at + SPONSOR_SILENT_S)  # then it waits for nobody
            used_at[waiting] = max(at, used_at.get(waiting, -math.inf))
    return used_at


def _own_use(extent: Extent, lines: Mapping[LinePriority, float]) -> float:
    """Return when an extent was used last; infinity while it is in use, or pinned."""
    is_pinned = extent.pinned or extent.window_pinned or extent.end.snapshot_pinned
    return math.inf if is_pinned or extent.end.pins else lines[extent.line]
