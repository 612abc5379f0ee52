"""Tests for worker/doctor/report_text.py: what a report says, and what it never says."""

import getpass
import platform
from pathlib import Path
from typing import Any

from hearth.shared.settings import load_settings
from hearth.worker.doctor.checked_machine import machine_facts, model_facts
from hearth.worker.doctor.findings import CheckResult, Findings, Subject, findings_json
from hearth.worker.doctor.report_text import report_text
from hearth.worker.setup.doctor_setup import settings_row
from scripts.harness.socketless_worker import loaded

FOUND = Findings(
    Subject("Apple M2 Max", "metal", "ab", "0.32.4", "0.32.2"),
    "bfloat16",
    (
        CheckResult("exact", "fault", {"largest": 0.125}, 12.0, "7 of 80 tokens | differ"),
        CheckResult("drafts", "differs", {"cost_4": 1.5, "cost_8": 2.5}, 3.0, "8 rows: other"),
        CheckResult("SSD", "left out", {}, 0.0, "nothing is written here"),
    ),
)


def row(found: Findings | None, auto: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "machine": machine_facts(),
        "model": model_facts(loaded("qwen3"), "float32"),
        "settings": settings_row(
            load_settings({"MODEL_PATH": str(Path.home()), "PROXY_API_KEY": "hush"}, None)
        ),
        "auto": auto,
        "state": "idle",
        "running": "",
        "findings": findings_json(found) if found is not None else None,
    }


def test_it_tells_verdicts_figures_and_what_auto_means() -> None:
    auto = [{"setting": "CACHE_EXACT", "now": "false", "next_start": "true"}]
    text = report_text(row(FOUND, auto))
    assert "| **exact**: CACHE_EXACT=true: warm answers against cold ones | fault |" in text
    assert "7 of 80 tokens / differ; largest 0.125 | 12.0 |" in text
    assert "| differs | 8 rows: other; cost_4 1.5, cost_8 2.5 | 3.0 |" in text
    assert "Faults: exact." in text and "Left out: SSD." in text
    assert "CACHE_EXACT is `auto` and means false now, and true from the next start on." in text


def test_it_names_no_person_no_host_no_place_and_no_key() -> None:
    text = report_text(row(FOUND, []))
    for secret in (str(Path.home()), platform.node(), "hush", str(loaded("qwen3").directory)):
        assert secret not in text, secret
    assert f"/{getpass.getuser()}/" not in text
    assert "- model: a local checkpoint" in text and "- architecture: qwen3" in text
