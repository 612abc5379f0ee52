"""Structured output by the SDKs' own helpers: a random model's answer is what was declared."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import Sdks, dictation
from tests.helpers.worker_processes.scripted_worker import FREEDOM

ASKED: list[Any] = [{"role": "user", "content": FREEDOM}]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
NO_THINKING: dict[str, Any] = {"extra_body": {"enable_thinking": False}}


class Report(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 3, 7]
    is_warm: bool


@STREAMED
def test_chat_parses_an_answer_of_a_declared_type(sdks: Sdks, stream: bool) -> None:
    chat = sdks.gpt.chat.completions
    body: dict[str, Any] = {"model": MODEL, "messages": ASKED, "response_format": Report}
    if stream:
        with chat.stream(**body, **NO_THINKING) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = chat.parse(**body, **NO_THINKING)
    (choice,) = answer.choices
    assert type(choice.message.parsed) is Report
    assert choice.finish_reason == "stop"


@STREAMED
def test_responses_parse_an_answer_of_a_declared_type(sdks: Sdks, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": FREEDOM, "reasoning": {"effort": "none"}}
    if stream:
        with sdks.gpt.responses.stream(**body, text_format=Report) as events:
            answer: Any = events.get_final_response()
    else:
        answer = sdks.gpt.responses.parse(**body, text_format=Report)
    assert type(answer.output_parsed) is Report
    assert answer.text.format.type == "json_schema"


@STREAMED
def test_messages_parse_an_answer_of_a_declared_type(sdks: Sdks, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 900, "messages": ASKED}
    body["thinking"] = {"type": "disabled"}
    if stream:
        with sdks.claude.messages.stream(**body, output_format=Report) as events:
            answer: Any = events.get_final_message()
    else:
        answer = sdks.claude.messages.parse(**body, output_format=Report)
    assert type(answer.parsed_output) is Report


@pytest.mark.parametrize("seed", range(4))
def test_any_json_object_is_one_object_or_was_cut_off(sdks: Sdks, seed: int) -> None:
    answer = sdks.gpt.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        response_format={"type": "json_object"},
        max_tokens=150,
        seed=seed,
        temperature=1.0,
        **NO_THINKING,
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason != "length":
        assert type(json.loads(text)) is dict


def test_json_that_the_model_writes_by_itself_stays_as_it_is(sdks: Sdks) -> None:
    text = '{"cities": ["Oslo", "Rome"], "days": 3}'
    asked: Any = [{"role": "user", "content": dictation(AnswerParts("Two cities.", text))}]
    answer = sdks.gpt.chat.completions.create(
        model=MODEL, messages=asked, response_format={"type": "json_object"}
    )
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two cities.", text)
    assert answer.choices[0].finish_reason == "stop"


def test_a_schema_that_cannot_be_held_is_refused_where_it_cannot(sdks: Sdks) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        sdks.gpt.chat.completions.create(model=MODEL, messages=ASKED, response_format=wanted)
    assert caught.value.code == "invalid_grammar"
    assert "at /properties/x" in caught.value.message


def test_strict_tools_are_parsed_by_the_sdk(sdks: Sdks) -> None:
    tool = openai.pydantic_function_tool(Report, name="report")
    answer = sdks.gpt.chat.completions.parse(
        model=MODEL,
        messages=ASKED,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        **NO_THINKING,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert type(call.function.parsed_arguments) is Report
