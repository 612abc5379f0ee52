"""Clients go on where the model writes arguments that are no object, or a file is cut in half.

As tests/e2e/agents/test_clients.py: the model's words are scripted, everything else is real.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import painted
from scripts.harness.model_families import family
from tests.helpers.clients.agent_projects import installed, made_place
from tests.helpers.clients.run_clients import AGENTS
from tests.helpers.clients.sdk_conversations import dictation
from tests.helpers.servers.scripted_server import ScriptedServer

DONE = "That was all."
AGAIN = "The picture was left out."
NO_OBJECTS = {
    "words": "ls -la",
    "a list": '["ls", "-la"]',
    "cut off": '{"cmd": "ls',
    "a text": '"ls"',
    "a number": "17",
    "null": "null",
    "nothing": "",
}
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def harmony() -> Iterator[ScriptedServer]:
    with ScriptedServer("harmony") as running:
        yield running


def told(arguments: str) -> str:
    """Return how a user has gpt-oss call with `arguments` as they stand, and then end."""
    call = f"<|channel|>commentary to=functions.exec_command code<|message|>{arguments}<|call|>"
    return dictation(call, family("harmony").written(AnswerParts("", DONE)))


@pytest.mark.parametrize("what", NO_OBJECTS)
def test_codex_goes_on_after_arguments_that_are_no_json_or_no_object(
    what: str, harmony: ScriptedServer, tmp_path: Path
) -> None:
    agent = installed(AGENTS["Codex"])
    place = made_place(tmp_path, harmony.url, agent.files)
    before = len(harmony.asked())
    run = agent.run(place, told(NO_OBJECTS[what]))
    assert run.code == 0, (run.out, run.err)
    assert agent.said(run) == DONE
    rows = [row for row in harmony.asked()[before:] if row.tools]
    assert len(rows) == 2, "it answers the call with what is wrong with it"


def thoughtless(*turns: AnswerParts) -> str:
    """Return how a user has a model answer whose prompt opens its thinking."""
    return dictation(*("</think>\n\n" + family("qwen3").written(parts) for parts in turns))


@pytest.fixture(scope="module")
def seeing() -> Iterator[ScriptedServer]:
    with ScriptedServer("qwen3", fixture_dir("qwen3_5_vl", tiny=True)) as running:
        yield running


def test_claude_code_goes_on_after_half_a_png_in_a_tool_result(
    seeing: ScriptedServer, tmp_path: Path
) -> None:
    """The answer that follows, and a later turn of the session in a new process."""
    agent = installed(AGENTS["Claude Code"])
    place = made_place(tmp_path, seeing.url, agent.files)
    file = io.BytesIO()
    painted(1, (224, 160)).save(file, "PNG")
    whole = file.getvalue()
    picture = place.project / "half.png"
    picture.write_bytes(whole[: len(whole) // 2])
    call = ToolCall("Read", {"file_path": str(picture)})
    first = agent.run(place, thoughtless(AnswerParts("", "", (call,)), AnswerParts("", DONE)))
    assert first.code == 0 and agent.said(first) == DONE, (first.out, first.err)
    second = agent.run(place, thoughtless(AnswerParts("", AGAIN)), first)
    assert second.code == 0 and agent.said(second) == AGAIN, (second.out, second.err)
