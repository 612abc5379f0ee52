"""Decides what is drafted by this worker: by its settings, its mode and what was found of it."""

from collections.abc import Mapping
from typing import Final

from hearth.shared.settings_from_env import Settings
from hearth.worker.doctor.findings import Findings
from hearth.worker.draft.draft_length import CPU_CURVE, ROWS_MAX
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.rewind import can_rewind
from hearth.worker.schedule.answer_drafts import CANNOT_VERIFY, DraftPolicy, Reach

# Where a forward of ROWS_MAX rows costs more than that, in forwards of one, a second branch is not
# worth its rows (docs/measuring.md).
TREE_COST_MAX: Final = 1.5


def draft_policy(
    settings: Settings, found: Findings | None, engine: Engine, *, is_exact: bool, is_cpu: bool
) -> DraftPolicy:
    """Return what is drafted; `found` are the doctor's findings about this model and machine.

    Whether the model can verify is tried when something first is: here its caches are asked.

    On a CPU, which is there to try Hearth out and to test it, nothing needs to be found, and no
    measured time decides anything.
    """
    mode = settings.speculate
    if settings.ranks > 1:
        return DraftPolicy(mode, reason=f"RANKS is {settings.ranks}: nothing is drafted over ranks")
    if is_exact:
        return DraftPolicy(mode, reason="exact mode: a draft may change an answer's last bits")
    if not can_rewind(engine.new_cache()):
        return DraftPolicy(mode, reason=CANNOT_VERIFY)
    reach: Reach = "all"
    reason = ""
    if mode == "off":
        reach, reason = "none", "SPECULATE=off"
    elif mode == "forced":
        reach = "forced"
    elif mode == "auto" and not is_cpu and (reason := _why_not(settings, found)):
        reach = "none"
    curve = row_costs(None if is_cpu else found)
    return DraftPolicy(mode, reach, "all", reason, curve, engine.decoder.takes_trees)


def row_costs(found: Findings | None) -> Mapping[int, float]:
    """Return what a forward of so many rows costs, in forwards of one: more rows never less."""
    if found is None or found.row_costs is None:
        return CPU_CURVE
    costs, most = {}, 1.0
    for rows, cost in sorted(found.row_costs.items()):
        costs[rows] = most = max(most, cost)
    return costs


def are_trees_cheap(found: Findings | None, *, is_cpu: bool) -> bool:
    """Return whether drafts with branches could be worth their rows."""
    costs = row_costs(None if is_cpu else found)
    return costs.get(ROWS_MAX, TREE_COST_MAX + 1) <= TREE_COST_MAX


def _why_not(settings: Settings, found: Findings | None) -> str:
    """Return why `auto` drafts nothing; "" where it does."""
    if found is None or found.drafts_alike is None or found.row_costs is None:
        when = "DOCTOR=off" if settings.doctor == "off" else "it does when idle"
        return f"hearth doctor has not checked this model on this machine: {when}"
    if not found.drafts_alike:
        return "hearth doctor found that several tokens in one forward give others than one by one"
    return ""
