"""Decides what is drafted by this worker: by its settings, its mode and what was found of it."""

from hearth.shared.settings_from_env import Settings
from hearth.worker.doctor.findings import Findings
from hearth.worker.draft.draft_length import CPU_CURVE
from hearth.worker.schedule.answers.answer_drafts import DraftPolicy, Reach


def draft_policy(
    settings: Settings, found: Findings | None, *, is_exact: bool, is_cpu: bool, takes_trees: bool
) -> DraftPolicy:
    """Return what is drafted; `found` are the doctor's findings about this model and machine.

    On a CPU, which is there to try Hearth out and to test it, nothing needs to be found first.
    """
    mode = settings.speculate
    if is_exact:
        return DraftPolicy(mode, reason="exact mode: a draft may change an answer's last bits")
    curve = (found.row_costs if found is not None else None) or CPU_CURVE
    reach: Reach = "all"
    reason = ""
    if mode == "off":
        reach, reason = "none", "SPECULATE=off"
    elif mode == "forced":
        reach = "forced"
    elif mode == "auto" and not is_cpu and (reason := _why_not(found)):
        reach = "none"
    return DraftPolicy(mode, reach, "all", reason, curve, takes_trees)


def _why_not(found: Findings | None) -> str:
    """Return why `auto` drafts nothing; "" where it does."""
    if found is None or found.drafts_alike is None or found.row_costs is None:
        return "hearth doctor has not checked this model on this machine: it does when idle"
    if not found.drafts_alike:
        return "hearth doctor found that several tokens in one forward give others than one by one"
    return ""
