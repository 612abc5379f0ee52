"""Rates how likely a request resumes at a joint: it decides which snapshots and windows stay.

A snapshot of a big hybrid is as large as the KV of thousands of tokens, and one is taken at every
cut. While there is room all stay; under pressure those go first whose loss costs the fewest
tokens for their bytes, so that they thin out and the ones below stay.
"""

from typing import Final

from hearth.worker.cache.extent_store import Joint
from hearth.worker.cache.prefill_grid import PrefillGrid

TIP: Final = 1.0  # where a line goes on
NEWEST: Final = 1.0  # at the last messages of its last prompt: some clients rewrite them each time
TRUNK: Final = 0.2  # where several requests have gone on before
PARTING: Final = 0.1  # where one has, where a turn ended, and amid system and tools
HEADER: Final = 0.05  # at an older message: where an edit would part
GRID: Final = 0.01  # amid a message
NEAR: Final = 2_048  # tokens from the end of a prompt: its last messages


def likelihood(joint: Joint, grid: PrefillGrid) -> float:
    """Return how likely a request of the line resumes here."""
    if joint.pins or not (joint.leaving or joint.is_left_out):
        return TIP
    if joint.resumed > 1:
        return TRUNK
    has_parted = joint.resumed or len(joint.leaving) > 1 or joint.is_left_out
    if has_parted or joint.is_prompt_end or joint.is_in_head:
        return PARTING
    if grid.is_point(joint.position):
        return GRID
    assert joint.arrival is not None, "nothing is kept at the root"
    line = joint.arrival.line
    return NEWEST if joint.position > max(line.resumed_at, line.read_to - NEAR) else HEADER


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
