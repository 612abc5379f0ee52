"""Checks that an answer in Messages or Responses is recognised when the client sends it back.

From the body to the sampled token and back: the model's words are scripted, all else is real.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from hearth.proxy.api.messages import messages_events, messages_request
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.api.responses import responses_events, responses_request
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.wire_messages import Delta, Finished
from hearth.worker.schedule.request_state import Request
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family
from tests.helpers.clients.api_events import Scripted

OMITTED = {"type": "adaptive", "display": "omitted"}
PARSERS = {"messages": messages_request.parse, "responses": responses_request.parse}
WHOLES = {"messages": messages_events.whole, "responses": responses_events.whole}
CALLED = AnswerParts("It must be read, and then I know.", "", (ToolCall("read", {"path": "/a/b"}),))
AGENT = [{"type": "function", "name": "read", "description": "Reads.", "parameters": {}}]


def answered(
    desk: Desk, request: ParsedRequest, parts: AnswerParts
) -> tuple[Request, dict[str, Any]]:
    """Have the model answer `parts`; return the worker's request, and what the client is told."""
    worker_request = desk.submit(desk.named(request.prompt), parts).request
    events: list[Delta | Finished] = []
    while not desk.machine.scheduler.is_idle:
        events += (row for row in desk.machine.step() if isinstance(row, Delta | Finished))
    answer = Scripted(*events, signature=worker_request.signature)
    admitted = AdmittedRequest(request, "m", answer)
    told = asyncio.run(WHOLES[request.dialect](admitted))
    return worker_request, json.loads(orjson.dumps(told))


def check_found(desk: Desk, first: Request, body: dict[str, Any], dialect: str) -> None:
    """Check that the next prompt begins with the first one and all that was sampled then."""
    second, _ = answered(desk, PARSERS[dialect](body), AnswerParts("", "Done."))
    known = [*first.ids, *first.sampled]
    assert second.visit is not None
    assert set(second.visit.states.values()) == {"kept"}
    assert second.ids[: len(known)] == known


@pytest.mark.parametrize("parts", [CALLED, AnswerParts("It is known already.", "It says so.")])
def test_thinking_that_was_not_shown_is_restored(parts: AnswerParts, tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    tool = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
    asked: list[Any] = [{"role": "user", "content": "What is in it?"}]
    body: dict[str, Any] = {"messages": asked, "tools": [tool], "thinking": OMITTED}
    first, told = answered(desk, messages_request.parse(body), parts)
    block = told["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": first.signature}
    asked.append({"role": "assistant", "content": told["content"]})
    if parts.calls:
        result = {"type": "tool_result", "tool_use_id": told["content"][1]["id"], "content": "x"}
        asked.append({"role": "user", "content": [result]})
    else:
        asked.append({"role": "user", "content": "And now?"})
    check_found(desk, first, body, "messages")


@pytest.mark.parametrize(
    "tools",
    [AGENT, [{"type": "namespace", "name": "files", "description": "Files.", "tools": AGENT}]],
    ids=["plain", "namespace"],
)
def test_an_item_that_comes_back_with_its_seal_alone_is_restored(
    tools: list[Any], tmp_path: Path
) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    name = "files__read" if tools is not AGENT else "read"
    given: list[Any] = [{"role": "user", "content": "What is in it?"}]
    body = {"input": given, "tools": tools, "reasoning": {"summary": "auto"}}
    parts = AnswerParts(CALLED.reasoning, "", (ToolCall(name, {"path": "/a/b"}),))
    first, told = answered(desk, responses_request.parse(body), parts)
    thought, call = told["output"]
    assert call["name"] == "read" and call.get("namespace", "") == name.rpartition("__")[0]
    assert thought["summary"][0]["text"] == CALLED.reasoning
    given += [thought | {"summary": []}, call]
    given.append({"type": "function_call_output", "call_id": call["call_id"], "output": "x"})
    check_found(desk, first, body, "responses")


def test_a_custom_tools_call_comes_back_as_what_the_model_wrote(tmp_path: Path) -> None:
    desk = Desk("qwen3", family("qwen3"), tmp_path)
    given: list[Any] = [{"role": "user", "content": "Change it."}]
    body = {"input": given, "tools": [{"type": "custom", "name": "apply_patch"}]}
    patch = '*** Begin Patch\n+a "b"\n*** End Patch'
    first, told = answered(
        desk,
        responses_request.parse(body),
        AnswerParts("Hm.", "", (ToolCall("apply_patch", {"input": patch}),)),
    )
    call = told["output"][-1]
    assert (call["type"], call["input"]) == ("custom_tool_call", patch)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    given += [*told["output"], output]
    check_found(desk, first, body, "responses")
