"""Checks the events that a client gets: channels, calls with their ids, finish reasons."""

from pathlib import Path

import pytest

from hearth.shared.wire_messages import Delta, Finished, Prompt, Sampling, Submit, Up
from hearth.worker.schedule.request_state import ClientLease, Request
from hearth.worker.sessions.turn_store import plain_id
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.agent_worker import Desk
from scripts.harness.model_families import family

FAMILIES = ("qwen3", "qwen3_5", "glm4", "harmony", "llama3", "gemma3", "mistral")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
QUESTION = [{"role": "user", "content": "What is in it?"}]


def desk(name: str, tmp_path: Path) -> Desk:
    return Desk("qwen3", family(name), tmp_path)


def events_of(desk: Desk, parts: AnswerParts) -> tuple[Request, list[Up]]:
    """Have one question answered `parts`; return all that the proxy is sent."""
    prompt = desk.named(Prompt(QUESTION, TOOLS))
    lease = ClientLease("q", b"peer")
    lease.lease_until = float("inf")
    submitted = Submit("q", prompt, Sampling(max_tokens=10_000))
    request = desk.builder.build(lease, submitted)
    script = desk.script(request, parts)
    end = desk.family.tokenizer.encode(desk.family.end_of(parts), add_special_tokens=False)
    desk.machine.scripts["q"] = [*script, *end]
    desk.machine.enter(request)
    events: list[Up] = []
    while not desk.machine.scheduler.is_idle:
        events += desk.machine.step()
    return request, events


def collected(events: list[Up]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return the reasoning, the content and the calls (id, name, arguments) of the deltas."""
    texts = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str, str]] = []
    for delta in (event for event in events if isinstance(event, Delta)):
        if delta.channel != "tool_call":
            assert delta.call is None
            texts[delta.channel] += delta.text
            continue
        if delta.call is not None:
            calls.append((delta.call.id, delta.call.name, ""))
        call_id, name, arguments = calls[-1]
        calls[-1] = (call_id, name, arguments + delta.text)
    return texts["reasoning"], texts["content"], calls


def ending(events: list[Up]) -> Finished:
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert events[-1] is finished
    return finished


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_comes_in_its_channels_and_its_calls_by_the_ids_that_are_recorded(
    name: str, tmp_path: Path
) -> None:
    worker = desk(name, tmp_path)
    thought = "It must be read." if worker.family.thinks else ""
    call = ToolCall("read", {"path": "/a/b"})
    request, events = events_of(worker, AnswerParts(thought, "", (call,)))
    reasoning, content, calls = collected(events)
    assert (reasoning, content) == (thought, "")
    ((call_id, called, arguments),) = calls
    assert (called, arguments.replace(" ", "")) == ("read", '{"path":"/a/b"}')
    assert ending(events).reason == "tool_calls"
    visit = request.visit
    assert visit is not None and visit.turn is not None
    assert visit.turn.call_ids == (call_id,) and plain_id(call_id) == call_id
    assert visit.turn.signature == (request.signature if thought else "")
    used = ending(events).usage
    assert (used.reasoning_tokens > 0) == bool(thought)
    assert used.reasoning_tokens < used.completion_tokens
