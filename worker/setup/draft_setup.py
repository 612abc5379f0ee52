"""Decides what is drafted by this worker: by its settings, its mode and what was found of it."""

from hearth.shared.settings_from_env import Settings
from hearth.worker.doctor.findings import Findings
from hearth.worker.draft.draft_length import CPU_CURVE
from hearth.worker.schedule.answer_drafts import DraftPolicy


def draft_policy(
    settings: Settings, found: Findings | None, *, is_exact: bool, is_cpu: bool
) -> DraftPolicy:
    """Return what is drafted; `found` are the doctor's findings about this model and machine.

    On a CPU, which is there to try Hearth out and to test it, nothing needs to be found first.
    """
    mode, costs = settings.speculate, found.row_costs if found is not None else None
    if is_exact:
        return DraftPolicy(mode, reason="exact mode: a draft may change an answer's last bits")
    curve = costs or CPU_CURVE
    if mode in ("forced", "lookup"):
        return DraftPolicy(mode, "forced" if mode == "forced" else "all", "all", "", curve)
    if mode == "off":
        return DraftPolicy(mode, "none", "all", "SPECULATE=off", curve)
    reason = "" if is_cpu else _why_not(found)
    return DraftPolicy(mode, "none" if reason else "all", "all", reason, curve)


def _why_not(found: Findings | None) -> str:
    """Return why `auto` drafts nothing; "" where it does."""
    if found is None or found.drafts_alike is None or found.row_costs is None:
        return "hearth doctor has not checked this model on this machine: it does when idle"
    if not found.drafts_alike:
        return "hearth doctor found that several tokens in one forward give others than one by one"
    return ""
