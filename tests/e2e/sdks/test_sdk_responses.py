"""OpenAI's SDK and Responses: what only that dialect has."""

import json
from typing import Any

import openai
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import OSLO, TOOLS, UTC, ResponsesTalk, Sdks, dictation
from tests.helpers.servers.scripted_server import ScriptedServer

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
OFFERED: Any = [{"type": "function", **tool} for tool in TOOLS]
ANSWER = AnswerParts("They ask.", "Warm.")


@pytest.fixture
def gpt(sdks: Sdks) -> openai.OpenAI:
    return sdks.gpt


def final_of(gpt: openai.OpenAI, stream: bool, **body: Any) -> Any:
    body |= {"model": MODEL}
    if not stream:
        return gpt.responses.create(**body)
    with gpt.responses.stream(**body) as events:
        return events.get_final_response()


@STREAMED
def test_three_turns_go_on_from_the_last_response(
    gpt: openai.OpenAI, scripted: ScriptedServer, stream: bool
) -> None:
    """A tool loop in which the client sends what is new only."""
    turns = (
        AnswerParts("One.", "", (OSLO,)),
        AnswerParts("Two.", "", (UTC,)),
        AnswerParts("Three.", "Warm."),
    )
    rules = "You know the weather. " * 20
    response = final_of(
        gpt, stream, input=dictation(*turns), tools=OFFERED, instructions=rules, store=True
    )
    for call in (OSLO, UTC):
        (item,) = [item for item in response.output if item.type == "function_call"]
        assert (item.name, json.loads(item.arguments)) == (call.name, call.arguments)
        used = response.usage
        row = {"type": "function_call_output", "call_id": item.call_id, "output": "20"}
        following = final_of(
            gpt,
            stream,
            input=[row],
            previous_response_id=response.id,
            tools=OFFERED,
            instructions=rules,
        )
        assert following.previous_response_id == response.id
        cached = following.usage.input_tokens_details.cached_tokens
        assert cached >= used.input_tokens + used.output_tokens - 16
        response = following
    assert response.output_text == "Warm."
    prompt = scripted.prompts()[-1]
    assert prompt.index("One.") < prompt.index("Two.")


def test_a_response_that_was_not_stored_is_not_there(gpt: openai.OpenAI) -> None:
    response = final_of(gpt, False, input=dictation(ANSWER), store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        final_of(gpt, False, input="And?", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(response.id)


@STREAMED
def test_a_response_is_retrieved_listed_and_deleted(gpt: openai.OpenAI, stream: bool) -> None:
    said = dictation(ANSWER)
    response = final_of(gpt, stream, input=said)
    kept = gpt.responses.retrieve(response.id)
    assert kept.output_text == response.output_text == "Warm."
    assert [item.type for item in kept.output] == ["reasoning", "message"]
    assert kept.usage == response.usage
    (item,) = gpt.responses.input_items.list(response.id)
    assert getattr(item, "content", None) == said
    gpt.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(response.id)


@STREAMED
def test_reasoning_is_summed_up_for_who_asks(gpt: openai.OpenAI, stream: bool) -> None:
    reasoning = {"effort": "medium", "summary": "auto"}
    response = final_of(gpt, stream, input=dictation(ANSWER), reasoning=reasoning)
    item = response.output[0]
    assert [part.text for part in item.summary] == ["They ask."]
    assert item.encrypted_content and not item.content


def test_reasoning_that_comes_back_without_its_text_is_restored(sdks: Sdks) -> None:
    talk = ResponsesTalk(sdks)
    turns = (AnswerParts("I look for it.", "", (OSLO,)), AnswerParts("", "Warm."))
    first = talk.user(dictation(*turns)).ask(tools=TOOLS)
    sealed = talk.history[1].model_dump() | {"content": None, "summary": []}
    talk.history[1] = sealed
    talk.result(first.call_ids[0], "20")
    second = talk.ask(tools=TOOLS)
    assert "I look for it." in sdks.server.prompts()[-1]
    assert second.cached >= first.prompt + first.completion - 16


@STREAMED
def test_a_custom_tool_is_called_with_free_text(gpt: openai.OpenAI, stream: bool) -> None:
    call = type(OSLO)("patch", {"input": '*** Begin\n+ a "line"'})
    said = dictation(AnswerParts("", "", (call,)), ANSWER)
    offered = [{"type": "custom", "name": "patch", "description": "Patches."}]
    response = final_of(gpt, stream, input=said, tools=offered)
    (item,) = [item for item in response.output if item.type == "custom_tool_call"]
    assert (item.name, item.input) == ("patch", '*** Begin\n+ a "line"')
    row = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
    after = final_of(gpt, stream, input=[row], previous_response_id=response.id, tools=offered)
    assert after.output_text == "Warm."


def test_events_are_numbered_and_items_open_and_close(gpt: openai.OpenAI) -> None:
    said = dictation(AnswerParts("I look.", "See.", (OSLO, UTC)))
    stream = gpt.responses.create(model=MODEL, input=said, tools=OFFERED, stream=True)
    events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    opened = [e.item.type for e in events if e.type == "response.output_item.added"]
    closed = [e.item.type for e in events if e.type == "response.output_item.done"]
    assert opened == closed == ["reasoning", "message", "function_call", "function_call"]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(each) for each in done] == [OSLO.arguments, UTC.arguments]
