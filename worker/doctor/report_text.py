"""Writes the findings as text for an issue, without prompts and names."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hearth.worker.doctor.findings import DAMAGE, Findings, findings_from

ABOUT: Final = {
    "speed": "how fast it reads and decodes",
    "logits": "log probabilities of cold answers are numbers",
    "exact": "CACHE_EXACT=true: warm answers against cold ones",
    "rewinds": "a conversation taken back to an earlier turn",
    "restores": "KV stored and restored, through the format of files too",
    "default": "CACHE_EXACT=false: warm answers against cold ones",
    "batches": "sequences that decode together against each alone",
    "drafts": "tokens verified in one forward against one by one, and what such a forward costs",
    "chunk": "reading by chunks of several sizes, tokens per second",
    "tables": "rows of tables read from the SSD at random",
    "SSD": "KV_CACHE_DIR written and read",
    "float16": "float16 in the place of bfloat16",
}
STATES: Final = {
    "running": "The checks are running, while no request is there: {running}.",
    "waiting": "The checks wait for a minute without requests.",
    "idle": "",
}


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = ["## hearth doctor", ""]
    lines += _list(report["machine"]) + _list(report["model"])
    lines += ["", "Settings: " + ", ".join(_pairs(report["settings"]))]
    state = STATES.get(report["state"], "").format(running=report["running"])
    lines += ["", state] if state else []
    found = findings_of(report)
    if found is None or not found.checks:
        remedy = "" if state else " `hearth doctor --again` runs the checks."
        lines += ["", f"Nothing was found out yet.{remedy}"]
    else:
        lines += ["", *_table(found), "", *_verdict(found)]
    lines += ["", *_auto(report["auto"])]
    return "\n".join(lines) + "\n"


def findings_of(report: Mapping[str, Any]) -> Findings | None:
    """Return the findings in a report; None if it has none, or if they cannot be read."""
    try:
        return findings_from(report["findings"]) if report["findings"] is not None else None
    except DAMAGE:
        return None


def _table(found: Findings) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d", time.gmtime(found.made_at))
    seconds = sum(check.seconds for check in found.checks)
    yield f"Checked on {when} in {seconds:.0f} s, weights in {found.dtype}:"
    yield ""
    yield "| check | verdict | figures | s |"
    yield "|---|---|---|---|"
    for check in found.checks:
        about = ABOUT.get(check.name, "")
        figures = ", ".join(_pairs(check.figures))
        details = "; ".join(part for part in (check.reason, figures) if part)
        name = f"**{check.name}**: {about}" if about else f"**{check.name}**"
        yield f"| {name} | {check.verdict} | {details.replace('|', '/')} | {check.seconds:.1f} |"


def _verdict(found: Findings) -> Iterator[str]:
    names = ", ".join(check.name for check in found.faults)
    if names:
        yield f"Faults: {names}. Please open an issue with this report."
    else:
        yield "No fault was found."
    left_out = ", ".join(check.name for check in found.checks if check.verdict == "left out")
    if left_out:
        yield f"Left out: {left_out}."


def _auto(settings: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a sentence for each `auto` setting: its value now, and from the next start on."""
    if not settings:
        yield "No setting that the checks look at is `auto`."
    for setting in settings:
        text = f"{setting['setting']} is `auto` and means {setting['now']} now"
        if setting["next_start"] != setting["now"]:
            text += f", and {setting['next_start']} from the next start on"
        yield text + "."


def _list(values: Mapping[str, Any]) -> list[str]:
    return [f"- {name.replace('_', ' ')}: {_shown(value)}" for name, value in values.items()]


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)
