"""Rates how likely a request resumes at a joint: it decides which snapshots and windows stay.

A snapshot of a big hybrid is as large as the KV of thousands of tokens, and one is taken at every
cut. While there is room all stay; under pressure those go first whose loss costs the fewest
tokens for their bytes, so that they thin out and the ones below stay.
"""

from typing import Final

from hearth.worker.cache.extent_store import Joint
from hearth.worker.cache.prefill_grid import PrefillGrid

TIP: Final = 1.0  # where a line goes on
BRANCH: Final = 0.5  # where lines have parted, or a request has gone on before
PROMPT_END: Final = 0.2  # where an earlier turn began
HEADER: Final = 0.1  # at a message: where an edit would part
GRID: Final = 0.02  # amid a message


def likelihood(joint: Joint, grid: PrefillGrid) -> float:
    """Return how likely a request of the line resumes here."""
    if not joint.leaving or joint.pins:
        return TIP
    if len(joint.leaving) > 1 or joint.resumed:
        return BRANCH
    if joint.is_prompt_end:
        return PROMPT_END
    return GRID if grid.is_point(joint.position) else HEADER


def is_resumable(joint: Joint, has_state: bool, window: int) -> bool:
    """Say whether the layers could be resumed here: with a state, and with the whole window."""
    if has_state and joint.snapshot is None:
        return False
    back_to = max(0, joint.position - window)
    extent = joint.arrival if window else None
    while extent is not None and extent.end.position > back_to:
        if not extent.window_covers(back_to):
            return False
        extent = extent.start.arrival
    return True
