"""The guide "Why was that slow?" names what there is: causes, settings, sources, log lines."""

import re
from pathlib import Path

from hearth.shared.settings_from_env import PROJECT_DIR, example_lines
from hearth.worker.sessions.divergence_cause import REMEDIES

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
    outside = {"POST", "DELETE"}
    assert named - settings - outside == set()
    assert len(named & settings) >= 20


def test_every_setting_that_a_remedy_names_is_in_the_guide() -> None:
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", " ".join(REMEDIES.values())))
    assert named and named <= set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", GUIDE))


def test_the_lines_of_the_log_that_it_quotes_are_written() -> None:
    written = "".join(
        (PROJECT_DIR / "worker" / name).read_text()
        for name in ("schedule/model_load_and_prefill_log.py", "setup/kv_setup.py")
    )
    for text in ("prefill request=", "loading step=", "no KV is reused"):
        assert text in written and any(text in each for each in QUOTED), text


def test_the_readme_leads_to_it() -> None:
    assert "(docs/why-slow.md)" in Path(PROJECT_DIR / "README.md").read_text()
