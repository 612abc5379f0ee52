"""Claude Code, Codex and opencode edit an indented block as models of three families ask them to.

As tests/e2e/agents/test_clients.py: each model writes as its makers' models do, marks and all,
behind its makers' own template, and everything but its words is real.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from scripts.harness.agent_worker import ideals
from tests.helpers.clients.agent_projects import installed, made_place
from tests.helpers.clients.run_clients import AGENTS
from tests.helpers.families.family_cases import written_family
from tests.helpers.families.spoken_families import WRITERS
from tests.helpers.servers.scripted_server import ScriptedServer

pytestmark = pytest.mark.night

HEAD: Final = "def chosen(a, b, s):\n"
OLD: Final = "    if a < b && s == \"é\":\n\t\treturn '<b>&amp;'\n"
NEW: Final = "\tif a <= b & s != 'ü\\n':\n        return \"日本 </b> &lt; ✓\"\n\n"
TAIL: Final = "    return None\n"
ASKED: Final = "Mend the condition in block.txt."
THOUGHTS: Final = ("I have to see the block first.", "This block it is.", "It is mended.")
SAID: Final = ("", "Now the edit.", "The condition is mended.")
SLACK: Final = 16  # tokens that a step may prefill beyond what is new

# How the clients call their tools for reading and editing, and the arguments.
TOOLS: Final = {
    "Claude Code": ("Read", "Edit", "file_path", "old_string", "new_string"),
    "opencode": ("read", "edit", "filePath", "oldString", "newString"),
}


def calls(client: str, file: str) -> list[list[tuple[str, dict[str, str]]]]:
    """Return the calls of each answer: the model reads the file, edits it, and is done."""
    if client == "Codex":  # takes patches by its tool for commands
        parts = ((" ", HEAD), ("-", OLD), ("+", NEW))
        lines = [f"{sign}{line}" for sign, text in parts for line in text.splitlines()]
        patch = "\n".join(("*** Begin Patch", f"*** Update File: {file}", "@@", *lines))
        command = f"    apply_patch <<'PATCH'\n{patch}\n*** End Patch\nPATCH\n"
        return [[("exec_command", {"cmd": text})] for text in (f"cat {file}", command)] + [[]]
    read, edit, path, old, new = TOOLS[client]
    return [[(read, {path: file})], [(edit, {path: file, old: OLD, new: NEW})], []]


@pytest.fixture(scope="module", params=WRITERS)
def scripted(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    with ScriptedServer(request.param) as running:
        yield running


@pytest.mark.parametrize("client", ["Codex", *TOOLS])
def test_an_indented_block_is_edited_as_the_model_wrote_it(
    client: str, scripted: ScriptedServer, tmp_path: Path
) -> None:
    agent = installed(AGENTS[client])
    place = made_place(tmp_path, scripted.url, agent.files)
    file = place.project / "block.txt"
    file.write_text(HEAD + OLD + TAIL)
    turns = [
        {"reasoning": thought, "content": said, "calls": made}
        for thought, said, made in zip(THOUGHTS, SAID, calls(client, str(file)), strict=True)
    ]
    scripted.answer({ASKED: turns})
    before = len(scripted.asked())
    run = agent.run(place, ASKED)
    assert file.read_text() == HEAD + NEW + TAIL, (run.out, run.err)
    assert run.code == 0 and agent.said(run) == SAID[-1], (run.out, run.err)
    assert not agent.warnings(place, run)
    family = written_family(scripted.family_name)
    assert not [mark for mark in (*family.controls, *family.marks) if mark in run.out + run.err]
    rows = [row for row in scripted.asked()[before:] if row.tools]
    assert len(rows) == len(SAID)
    for row, ideal in zip(rows[1:], ideals(rows)[1:], strict=True):
        assert set(row.states) == {"kept"}, row.states
        assert row.prefilled <= ideal + SLACK, (row.prefilled, ideal, len(row.ids))
