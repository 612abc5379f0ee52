"""The official SDKs and what only one dialect has: choices, threads, responses that are kept."""

import json
from typing import Any

import anthropic
import openai
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import CONTEXT_TOKENS, MODEL
from tests.helpers.clients.sdk_conversations import (
    OSLO,
    TALKS,
    TOOLS,
    UTC,
    MessagesTalk,
    ResponsesTalk,
    Sdks,
    dictation,
)
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import FREEDOM, SMALL_TALK

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
OFFERED: Any = [{"type": "function", **tool} for tool in TOOLS]
ANSWER = AnswerParts("They ask.", "Warm.")


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


# ---------------------------------------------------------------- chat, raw prompts and models


def test_choices_are_drawn_apart_and_the_first_is_the_one_alone(sdks: Sdks) -> None:
    body = asked(FREEDOM, temperature=1.5, max_tokens=12, seed=1)
    body["extra_body"] = {"enable_thinking": False}
    one, several = (sdks.gpt.chat.completions.create(**body, n=n) for n in (1, 3))
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3 and texts[0] == one.choices[0].message.content


def test_calls_that_may_not_be_parallel_are_one(sdks: Sdks) -> None:
    talk = TALKS["chat"](sdks, parallel_tool_calls=False)
    talk.options |= talk.thinking(False)
    assert len(talk.user(FREEDOM).ask(tools=TOOLS, choice="required").calls) == 1


@STREAMED
def test_a_raw_prompt_is_continued_without_a_template(
    sdks: Sdks, scripted: ScriptedServer, stream: bool
) -> None:
    answer: Any = sdks.gpt.completions.create(model=MODEL, prompt="Once upon", stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == SMALL_TALK
    assert scripted.prompts()[-1] == "Once upon"


def test_models_are_listed_and_looked_up_in_both_sdks(sdks: Sdks) -> None:
    listed = {model.id: model for model in sdks.gpt.models.list()}
    assert listed[MODEL].model_dump()["context_length"] == CONTEXT_TOKENS
    assert sdks.gpt.models.retrieve(MODEL).id == MODEL
    assert [model.id for model in sdks.claude.models.list()] == list(listed)
    found = sdks.claude.models.retrieve(MODEL)
    assert (found.type, found.max_input_tokens) == ("model", CONTEXT_TOKENS)
    with pytest.raises(openai.NotFoundError):
        sdks.gpt.models.retrieve("llama-99")


# ---------------------------------------------------------------- Messages


@STREAMED
def test_a_stop_sequence_ends_the_text_and_is_named(sdks: Sdks, stream: bool) -> None:
    talk = MessagesTalk(sdks, stop_sequences=["never", ", and"])
    told = talk.user(dictation(AnswerParts("", "Warm, and it stays so."))).ask(stream=stream)
    assert (told.content, told.reason, told.raw.stop_sequence) == ("Warm", "stop_sequence", ", and")


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


def test_what_betas_send_is_accepted(sdks: Sdks, scripted: ScriptedServer) -> None:
    ephemeral: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": ephemeral}]
    sdks.claude.beta.messages.create(
        **asked("Hi.", max_tokens=9),
        betas=["of-the-day-2099-01-01"],
        system=system,
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        extra_query={"beta": "true"},
        extra_body={"a_field_of_tomorrow": {"x": 1}},
    )
    assert "Be brief." in scripted.prompts()[-1]


def test_the_tool_runner_ends_a_loop_and_sends_its_history(sdks: Sdks) -> None:
    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Tells the weather of a city."""
        asked_for.append((city, days))
        return "warm"

    asked_for: list[tuple[str, int]] = []
    told = dictation(AnswerParts("", "", (OSLO,)), AnswerParts("", "Warm in Oslo."))
    body = asked(told, max_tokens=300, tools=[get_weather])
    final: Any = sdks.claude.beta.messages.tool_runner(**body).until_done()
    assert asked_for == [("Oslo", 3)]
    assert [block.text for block in final.content if block.type == "text"] == ["Warm in Oslo."]


def test_a_thread_is_refused_as_the_api_refuses_it(sdks: Sdks) -> None:
    """The SDK's tool runner sends what is new only, unless it is told that this is not kept."""
    body: Any = asked("Hi.", max_tokens=9, thread={"type": "create"})
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdks.claude.beta.messages.create(**body)
    assert type(caught.value).__name__ == "ThreadUnsupportedRequestError"


# ---------------------------------------------------------------- Responses


def final_of(sdks: Sdks, stream: bool, **body: Any) -> Any:
    if not stream:
        return sdks.gpt.responses.create(model=MODEL, **body)
    with sdks.gpt.responses.stream(model=MODEL, **body) as events:
        return events.get_final_response()


@STREAMED
def test_turns_go_on_from_the_last_response_which_is_read_listed_and_deleted(
    sdks: Sdks, scripted: ScriptedServer, stream: bool
) -> None:
    """A tool loop in which the client sends what is new only."""
    patch = type(OSLO)("patch", {"input": '*** Begin\n+ a "line"'})
    loop = ((OSLO, "One."), (UTC, "Two."), (patch, "Three."))
    turns = [AnswerParts(thought, "", (call,)) for call, thought in loop]
    said = dictation(*turns, AnswerParts("Four.", "Warm."))
    tools = [*OFFERED, {"type": "custom", "name": "patch", "description": "Patches."}]
    same: dict[str, Any] = {"tools": tools, "instructions": "You know the weather. " * 20}
    first = response = final_of(sdks, stream, input=said, **same)
    for call, _ in loop:
        (item,) = [item for item in response.output if item.type.endswith("_call")]
        given = item.input if call is patch else json.loads(item.arguments)
        assert (item.name, given) == (
            call.name,
            patch.arguments["input"] if call is patch else call.arguments,
        )
        used = response.usage
        row = {"type": f"{item.type}_output", "call_id": item.call_id, "output": "20"}
        response = final_of(sdks, stream, input=[row], previous_response_id=response.id, **same)
        cached = response.usage.input_tokens_details.cached_tokens
        assert cached >= used.input_tokens + used.output_tokens - 16
    assert response.output_text == "Warm."
    prompt = scripted.prompts()[-1]
    assert prompt.index("One.") < prompt.index("Two.") < prompt.index("Three.")
    kept = sdks.gpt.responses.retrieve(response.id)
    assert (kept.output_text, kept.usage) == ("Warm.", response.usage)
    (listed,) = sdks.gpt.responses.input_items.list(first.id)
    assert getattr(listed, "content", None) == said
    sdks.gpt.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdks.gpt.responses.retrieve(response.id)


def test_a_response_that_was_not_stored_is_not_there(sdks: Sdks) -> None:
    response = final_of(sdks, False, input=dictation(ANSWER), store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        final_of(sdks, False, input="And?", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_reasoning_that_comes_back_without_its_text_is_restored(sdks: Sdks) -> None:
    talk = ResponsesTalk(sdks)
    turns = (AnswerParts("I look for it.", "", (OSLO,)), AnswerParts("", "Warm."))
    first = talk.user(dictation(*turns)).ask(tools=TOOLS)
    talk.history[1] = talk.history[1].model_dump() | {"content": None, "summary": []}
    talk.result(first.call_ids[0], "20")
    second = talk.ask(tools=TOOLS)
    assert "I look for it." in sdks.server.prompts()[-1]
    assert second.cached >= first.prompt + first.completion - 16
