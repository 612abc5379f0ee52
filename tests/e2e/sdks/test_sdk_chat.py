"""OpenAI's SDK and chat completions: what only that dialect has."""

import json
from typing import Any

import openai
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import CONTEXT_TOKENS, MODEL
from tests.helpers.clients.sdk_conversations import CLOCK, OSLO, TALKS, WEATHER, Sdks, dictation
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import FREEDOM, SMALL_TALK

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ANSWER = "It is warm in Rome, and it stays so."
FUNCTIONS: list[Any] = [WEATHER, CLOCK]


@pytest.fixture
def gpt(sdks: Sdks) -> openai.OpenAI:
    return sdks.gpt


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def final_of(gpt: openai.OpenAI, stream: bool, body: dict[str, Any]) -> Any:
    if not stream:
        return gpt.chat.completions.create(**body)
    with gpt.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
        list(events)
        return events.current_completion_snapshot


# ---------------------------------------------------------------- chat


@STREAMED
def test_a_stop_string_ends_the_text_before_it(gpt: openai.OpenAI, stream: bool) -> None:
    said = dictation(AnswerParts("In Rome, and in Oslo.", ANSWER))
    answer = final_of(gpt, stream, asked(said, stop=[", and it"]))
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("It is warm in Rome", "stop")


@STREAMED
def test_choices_are_drawn_apart_and_their_prompt_counts_once(
    gpt: openai.OpenAI, stream: bool
) -> None:
    free = {"temperature": 1.5, "max_tokens": 12, "seed": 1}
    body = asked(FREEDOM, extra_body={"enable_thinking": False}, **free)
    one = gpt.chat.completions.create(**body)
    if stream:
        chunks = list(gpt.chat.completions.create(**body, n=3, stream=True))
        texts = ["", "", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert [reason for reason in reasons if reason] == ["length"] * 3
    else:
        answer = gpt.chat.completions.create(**body, n=3)
        assert answer.usage is not None and one.usage is not None
        assert answer.usage.prompt_tokens == one.usage.prompt_tokens
        assert answer.usage.completion_tokens == 36
        texts = [choice.message.content or "" for choice in answer.choices]
    assert len(set(texts)) == 3
    assert texts[0] == one.choices[0].message.content


def test_logprobs_come_streamed_as_whole(gpt: openai.OpenAI) -> None:
    body = asked(FREEDOM, logprobs=True, top_logprobs=2, max_tokens=6, temperature=0)
    body["extra_body"] = {"enable_thinking": False}
    rows = [final_of(gpt, stream, body).choices[0].logprobs.content for stream in (False, True)]
    whole, streamed = ([(row.token, len(row.top_logprobs)) for row in each] for each in rows)
    assert whole == streamed
    assert [count for _, count in whole] == [2] * 6


def test_usage_comes_last_and_only_where_it_is_asked_for(gpt: openai.OpenAI) -> None:
    body = asked(dictation(AnswerParts("", ANSWER)))
    plain = list(gpt.chat.completions.create(**body, stream=True))
    assert all(chunk.usage is None for chunk in plain)
    wanted: Any = {"include_usage": True}
    *chunks, last = gpt.chat.completions.create(**body, stream=True, stream_options=wanted)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens > 0


@STREAMED
def test_functions_of_the_old_api_are_called_and_answered(gpt: openai.OpenAI, stream: bool) -> None:
    said = dictation(AnswerParts("", "", (OSLO,)), AnswerParts("", "Warm."))
    body = asked(said, functions=FUNCTIONS)
    if stream:
        chunks = list(gpt.chat.completions.create(**body, stream=True))
        deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
        name = "".join(delta.name or "" for delta in deltas if delta)
        arguments = "".join(delta.arguments or "" for delta in deltas if delta)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = gpt.chat.completions.create(**body).choices
        call: Any = choice.message.function_call
        name, arguments, reason = call.name, call.arguments, choice.finish_reason
    assert (name, json.loads(arguments), reason) == (OSLO.name, OSLO.arguments, "function_call")
    body["messages"] += [
        {"role": "assistant", "function_call": {"name": name, "arguments": arguments}},
        {"role": "function", "name": name, "content": "warm"},
    ]
    # The old API's results have no id of a call.
    assert final_of(gpt, False, body).choices[0].message.content == "Warm."


def test_calls_that_may_not_be_parallel_are_one(sdks: Sdks) -> None:
    talk = TALKS["chat"](sdks, parallel_tool_calls=False)
    talk.options |= talk.thinking(False)
    told = talk.user(FREEDOM).ask(tools=(WEATHER, CLOCK), choice="required")
    assert len(told.calls) == 1


# ---------------------------------------------------------------- raw completions and models


@STREAMED
def test_a_raw_prompt_is_continued_without_a_template(
    gpt: openai.OpenAI, scripted: ScriptedServer, stream: bool
) -> None:
    if stream:
        wanted: Any = {"include_usage": True}
        chunks = list(
            gpt.completions.create(
                model=MODEL, prompt="Once upon", stream=True, stream_options=wanted
            )
        )
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        usage: Any = chunks[-1].usage
    else:
        answer = gpt.completions.create(model=MODEL, prompt="Once upon")
        text, usage = answer.choices[0].text, answer.usage
        assert answer.choices[0].finish_reason == "stop"
    assert text == SMALL_TALK
    assert scripted.prompts()[-1] == "Once upon"
    assert usage.prompt_tokens == len(scripted.asked()[-1].ids)


def test_models_are_listed_and_looked_up_in_both_sdks(sdks: Sdks) -> None:
    listed = {model.id: model for model in sdks.gpt.models.list()}
    assert listed[MODEL].model_dump()["context_length"] == CONTEXT_TOKENS
    assert sdks.gpt.models.retrieve(MODEL).id == MODEL
    models = sdks.claude.models.list()
    assert [model.id for model in models] == list(listed)
    found = sdks.claude.models.retrieve(MODEL)
    assert (found.type, found.max_input_tokens) == ("model", CONTEXT_TOKENS)
    with pytest.raises(openai.NotFoundError):
        sdks.gpt.models.retrieve("llama-99")
