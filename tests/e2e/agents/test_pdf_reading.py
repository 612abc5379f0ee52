"""Claude Code reads PDFs with its own tool: the model is shown their text; a scan ends nothing."""

from pathlib import Path

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.model_families import family
from tests.helpers.clients.agent_projects import installed, made_place
from tests.helpers.clients.run_clients import AGENTS
from tests.helpers.clients.sdk_conversations import dictation
from tests.helpers.pdf_files import text_pdf
from tests.helpers.servers.scripted_server import ScriptedServer

PAGES = ("the harbor is quiet", "the meadow is dusty")
DONE = "Both were read."
pytestmark = pytest.mark.clients


def test_claude_code_reads_a_pdf_and_a_scan_and_goes_on(
    scripted: ScriptedServer, tmp_path: Path
) -> None:
    agent = installed(AGENTS["Claude Code"])
    place, before = made_place(tmp_path, scripted.url, agent.files), len(scripted.asked())
    files = {"notes.pdf": text_pdf(*PAGES), "scan.pdf": text_pdf("", "")}
    turns = []
    for name, data in files.items():
        (place.project / name).write_bytes(data)
        call = ToolCall("Read", {"file_path": str(place.project / name)})
        turns.append(AnswerParts("", "", (call,)))
    run = agent.run(place, dictation(*turns, AnswerParts("", DONE)))
    assert run.code == 0, (run.out, run.err)
    assert agent.said(run) == DONE
    rows = [row for row in scripted.asked()[before:] if row.tools]
    read = family(scripted.family_name).tokenizer.decode(rows[-1].ids)
    assert f"Page 1:\n{PAGES[0]}\n\nPage 2:\n{PAGES[1]}" in read
    assert "[document omitted: The PDF has 2 pages and no text" in read
    assert all(row.prefilled < 1_000 for row in rows[1:]), "the text stays the same"
