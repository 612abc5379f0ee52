"""count_tokens says what the request that follows is then charged, to the token."""

from typing import Any

import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import (
    CLOCK,
    OSLO,
    TOOLS,
    WEATHER,
    MessagesTalk,
    Sdks,
    dictation,
)
from tests.helpers.worker_processes.scripted_worker import FREEDOM

USER = {"role": "user", "content": "What is the weather like?"}
BLOCKS = [
    {"type": "text", "text": "You know the weather.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "You tell it."},
]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
USE = {"type": "tool_use", "id": "toolu01", "name": "get_weather", "input": {"city": "Oslo"}}


def shaped(*tools: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [
        {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} | more
        for t in tools
    ]


def result(content: Any, **more: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": "toolu01", "content": content, **more}
    return {"role": "user", "content": [block, {"type": "text", "text": "Go on."}]}


def loop(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": [USE]}, result(content, **more)]


LOADED = [{"type": "tool_reference", "tool_name": "get_time"}]
BODIES: dict[str, dict[str, Any]] = {
    "text": {},
    "system": {"system": "You know the weather."},
    "system in blocks": {"system": BLOCKS},
    "tools": {"tools": shaped(*TOOLS)},
    "tools and a choice": {
        "messages": [{"role": "user", "content": FREEDOM}],
        "tools": shaped(*TOOLS),
        "tool_choice": {"type": "any"},
    },
    "thinking": {"thinking": THINKING, "tools": shaped(*TOOLS), "system": BLOCKS},
    "no thinking": {"thinking": {"type": "disabled"}, "tools": shaped(*TOOLS)},
    "tool result": {"messages": loop("It is warm."), "tools": shaped(*TOOLS)},
    "tool result in blocks": {
        "messages": loop([{"type": "text", "text": "It is"}, {"type": "text", "text": " warm."}]),
        "tools": shaped(*TOOLS),
        "thinking": THINKING,
    },
    "tool error": {"messages": loop("No such city", is_error=True), "tools": shaped(*TOOLS)},
    "deferred tools": {"tools": [*shaped(WEATHER), *shaped(CLOCK, defer_loading=True)]},
    "a deferred tool that is loaded": {
        "messages": loop(LOADED),
        "tools": [*shaped(WEATHER), *shaped(CLOCK, defer_loading=True)],
    },
    "thinking that we did not sign": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Warm, I think.", "signature": "abc"},
                    {"type": "text", "text": "Warm."},
                ],
            },
            {"role": "user", "content": "Sure?"},
        ],
        "thinking": THINKING,
    },
}


def charged(usage: Any) -> int:
    return int(
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BODIES)
def test_a_count_is_what_the_request_is_charged(sdks: Sdks, name: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [USER], **BODIES[name]}
    count = sdks.claude.messages.count_tokens(**body).input_tokens
    if stream:
        with sdks.claude.messages.stream(**body, max_tokens=2) as events:
            kinds = {event.type: event for event in events}
            final = events.get_final_message()
        opened: Any = kinds["message_start"]
        assert charged(opened.message.usage) == count
    else:
        final = sdks.claude.messages.create(**body, max_tokens=2)
    assert charged(final.usage) == count


def test_the_cases_differ(sdks: Sdks) -> None:
    """Each of these says something to the model: a count that overlooks it would be exact too."""

    def count(name: str) -> int:
        body = {"model": MODEL, "messages": [USER], **BODIES[name]}
        return sdks.claude.messages.count_tokens(**body).input_tokens

    assert count("text") < count("system") < count("tools")
    assert count("no thinking") > count("tools"), "the closed block is a part of the prompt"
    assert count("text") < count("deferred tools") < count("tools")
    assert count("deferred tools") < count("a deferred tool that is loaded")


def test_a_count_of_what_the_model_itself_said_is_exact_too(sdks: Sdks) -> None:
    """Its turn is fed as it was sampled, not as its text would be tokenised."""
    talk = MessagesTalk(sdks, thinking=THINKING)
    turns = (AnswerParts("Let me see.", "", (OSLO,)), AnswerParts("It is warm.", "Warm."))
    first = talk.user(dictation(*turns)).ask(tools=TOOLS)
    talk.result(first.call_ids[0], "warm")
    body: dict[str, Any] = {"messages": talk.history, "tools": shaped(*TOOLS)}
    count = sdks.claude.messages.count_tokens(model=MODEL, thinking=THINKING, **body)
    told = talk.ask(tools=TOOLS)
    assert told.prompt == count.input_tokens
    assert told.cached >= first.prompt + first.completion - 16
