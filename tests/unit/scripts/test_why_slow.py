"""The guide "Why was that slow?" names what there is: causes, settings, sources, log lines."""

import re

from hearth.shared.paths import PROJECT_DIR
from hearth.worker.sessions.session_context import REMEDIES
from scripts.docs.settings_table import example_lines

GUIDE = (PROJECT_DIR / "docs" / "why-slow.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", GUIDE)


def test_every_cause_of_a_loss_is_in_the_guide_and_no_other() -> None:
    table = GUIDE.split("| cause |")[1].split("\n\n")[0]
    told = [
        cause
        for row in table.splitlines()[2:]
        for cause in re.findall(r"`([^`]+)`", row[: row.index("|", 1)])
    ]
    assert sorted(told) == sorted(REMEDIES)


def test_every_setting_that_the_guide_names_is_one() -> None:
    settings = {line.split("=")[0] for line in example_lines()[1::2]}
    named = {found for each in QUOTED for found in re.findall(r"\b[A-Z][A-Z_]{3,}[A-Z]\b", each)}
    assert named - settings - {"POST", "DELETE"} == set()
    assert len(named & settings) >= 20
