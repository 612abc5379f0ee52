"""The workflow file for a hosted Mac parses, names commands that exist, and pins its actions."""

import re
import shlex
from typing import Any

import pytest
import yaml

import install_and_run
from hearth.commands.main import COMMANDS
from tests.helpers.documents import ROOT

FILE = ROOT / ".github" / "workflows" / "mac.yml"
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text())
JOB = WORKFLOW["jobs"]["mac"]
COMMANDS_RUN = [step["run"] for step in JOB["steps"] if "run" in step]


def test_each_action_is_pinned_to_a_commit_and_says_its_version() -> None:
    lines = re.findall(r"uses: (.+)", FILE.read_text())
    assert len(lines) == 3
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}  # v[\d.]+", line) for line in lines)


@pytest.mark.parametrize("command", COMMANDS_RUN)
def test_each_command_exists_and_takes_what_it_is_given(command: str) -> None:
    words = shlex.split(command.split(">")[0])
    if words[:2] == ["python3", "install_and_run.py"]:
        assert words[2:] == ["test", "fast"] or install_and_run.parse(words[2:]).check
    elif words[0] == ".venv/bin/hearth":
        assert words[1] in COMMANDS and not words[2:]
    else:
        assert words == ["cat", "doctor.md"]
