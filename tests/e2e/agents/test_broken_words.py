"""Clients go on where the model writes arguments that are no object, or a file is cut in half.

As tests/e2e/agents/test_clients.py: the model's words are scripted, everything else is real.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import painted
from scripts.harness.model_families import family
from tests.helpers.clients.agent_projects import installed, made_place
from tests.helpers.clients.run_clients import AGENTS, MODEL
from tests.helpers.clients.sdk_conversations import dictation
from tests.helpers.servers.scripted_server import ScriptedServer

DONE = "That was all."
AGAIN = "The picture was left out."
NO_OBJECTS = pytest.mark.parametrize(
    "arguments",
    ["ls -la", '["ls", "-la"]', '{"cmd": "ls', '"ls"', "17", "null", ""],
    ids=["words", "list", "cut", "text", "number", "null", "nothing"],
)
WANTED: Any = {name: {"type": "string"} for name in ("cmd", "workdir")}  # text alone fits neither
RUN: Any = {
    "name": "exec_command",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": WANTED, "required": list(WANTED)},
}


@pytest.fixture(scope="module")
def harmony() -> Iterator[ScriptedServer]:
    with ScriptedServer("harmony") as running:
        yield running


def told(arguments: str) -> str:
    """Return how a user has gpt-oss call with `arguments` as they stand, and then end."""
    call = f"<|channel|>commentary to=functions.exec_command code<|message|>{arguments}<|call|>"
    return dictation(call, family("harmony").written(AnswerParts("", DONE)))


@NO_OBJECTS
def test_codex_goes_on_after_arguments_that_are_no_json_or_no_object(
    arguments: str, harmony: ScriptedServer, tmp_path: Path
) -> None:
    agent = installed(AGENTS["Codex"])
    place = made_place(tmp_path, agent, harmony.url)
    before = len(harmony.asked())
    run = agent.run(place, told(arguments))
    assert run.code == 0, (run.out, run.err)
    assert agent.said(run) == DONE
    rows = [row for row in harmony.asked()[before:] if row.tools]
    assert len(rows) == 2, "it answers the call with what is wrong with it"


@NO_OBJECTS
def test_anthropics_sdk_streams_a_call_whose_arguments_are_no_object(
    arguments: str, harmony: ScriptedServer
) -> None:
    messages: list[Any] = [{"role": "user", "content": told(arguments)}]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": [RUN]}
    with anthropic.Anthropic(base_url=harmony.url, api_key="local", max_retries=0) as claude:
        whole = claude.messages.create(messages=messages, **body)
        with claude.messages.stream(messages=messages, **body) as events:
            streamed = events.get_final_message()
        (call,) = [block for block in streamed.content if block.type == "tool_use"]
        (same,) = [block for block in whole.content if block.type == "tool_use"]
        assert isinstance(call.input, dict) and call.input == same.input
        assert streamed.stop_reason == whole.stop_reason
        messages.append({"role": "assistant", "content": streamed.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "x", "is_error": True}
        messages.append({"role": "user", "content": [result]})
        with claude.messages.stream(messages=messages, **body) as events:
            assert events.get_final_text() == DONE


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
    place = made_place(tmp_path, agent, seeing.url)
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
