"""Anthropic's SDK and Messages: what only that dialect has."""

from typing import Any

import anthropic
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import OSLO, TOOLS, MessagesTalk, Sdks, dictation
from tests.helpers.servers.scripted_server import ScriptedServer

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
THOUGHTFUL = AnswerParts("They ask about Rome.", "Warm, and it stays so.")


@pytest.fixture
def claude(sdks: Sdks) -> anthropic.Anthropic:
    return sdks.claude


def asked(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "max_tokens": 300, "messages": messages, **more}


def final_of(claude: anthropic.Anthropic, stream: bool, body: dict[str, Any]) -> Any:
    if not stream:
        return claude.messages.create(**body)
    with claude.messages.stream(**body) as events:
        return events.get_final_message()


@STREAMED
def test_a_stop_sequence_ends_the_text_and_is_named(
    claude: anthropic.Anthropic, stream: bool
) -> None:
    body = asked(dictation(THOUGHTFUL), stop_sequences=["never", ", and"])
    message = final_of(claude, stream, body)
    assert message.content[-1].text == "Warm"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", and")


@STREAMED
def test_thinking_that_is_not_shown_is_signed_and_found_again(sdks: Sdks, stream: bool) -> None:
    talk = MessagesTalk(sdks, thinking={"type": "adaptive", "display": "omitted"})
    turns = (AnswerParts("I look.", "", (OSLO,)), AnswerParts("Warm it is.", "Warm."))
    first = talk.user(dictation(*turns)).ask(stream=stream, tools=TOOLS)
    assert (first.reasoning, first.kinds) == ("", ["thinking", "tool_use"])
    talk.result(first.call_ids[0], "warm")
    second = talk.ask(stream=stream, tools=TOOLS)
    assert "I look." in sdks.server.prompts()[-1]
    assert second.cached >= first.prompt + first.completion - 16


def test_signatures_differ_from_answer_to_answer(claude: anthropic.Anthropic) -> None:
    answers = [final_of(claude, False, asked(dictation(THOUGHTFUL))) for _ in range(2)]
    assert len({answer.content[0].signature for answer in answers}) == 2


def test_a_stream_opens_with_its_usage_and_a_ping(claude: anthropic.Anthropic) -> None:
    body = asked(dictation(THOUGHTFUL))
    events: list[Any] = list(claude.messages.create(**body, stream=True))
    whole = final_of(claude, False, body)
    opened, ended = events[0].message.usage, events[-2].usage
    assert opened.input_tokens + opened.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )
    assert ended.output_tokens == whole.usage.output_tokens > 0 == opened.output_tokens


def test_what_betas_send_is_accepted(claude: anthropic.Anthropic, scripted: ScriptedServer) -> None:
    ephemeral: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": ephemeral}]
    edits: Any = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    message = claude.beta.messages.create(
        **asked(dictation(AnswerParts("", "Warm."))),
        betas=["of-the-day-2099-01-01"],
        system=system,
        context_management=edits,
        metadata={"user_id": "one"},
        extra_query={"beta": "true"},
        extra_body={"a_field_of_tomorrow": {"x": 1}},
    )
    assert [block.type for block in message.content] == ["text"]
    assert "Be brief." in scripted.prompts()[-1]


def test_several_results_and_an_error_reach_the_model(sdks: Sdks) -> None:
    talk = MessagesTalk(sdks)
    turns = (AnswerParts("", "", (OSLO, OSLO)), AnswerParts("", "Warm."))
    first = talk.user(dictation(*turns)).ask(tools=TOOLS)
    talk.result(first.call_ids[0], "sunny and warm")
    talk.result(first.call_ids[1], "no such station")
    talk.history[-1]["content"][1]["is_error"] = True
    assert talk.ask(tools=TOOLS).content == "Warm."
    prompt = sdks.server.prompts()[-1]
    assert prompt.index("sunny and warm") < prompt.index("Error: no such station")


def test_the_tool_runner_ends_a_loop_and_sends_its_history(sdks: Sdks) -> None:
    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Tells the weather of a city."""
        asked.append((city, days))
        return "warm"

    asked: list[tuple[str, int]] = []
    told = dictation(AnswerParts("", "", (OSLO,)), AnswerParts("", "Warm in Oslo."))
    runner = sdks.claude.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=300,
        messages=[{"role": "user", "content": told}],
        tools=[get_weather],
    )
    final = runner.until_done()
    assert asked == [("Oslo", 3)]
    assert [block.text for block in final.content if block.type == "text"] == ["Warm in Oslo."]


def test_a_thread_is_refused_as_the_api_refuses_it(claude: anthropic.Anthropic) -> None:
    """The SDK's tool runner sends what is new only, unless it is told that this is not kept."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.beta.messages.create(**asked("Hi."), thread={"type": "create"})
    assert type(caught.value).__name__ == "ThreadUnsupportedRequestError"
