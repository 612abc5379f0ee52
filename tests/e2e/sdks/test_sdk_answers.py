"""The official SDKs against the running server: what an answer says, in every dialect alike.

The model's words are dictated at token level, or it is left to write what it likes under a
grammar; all else is real.
"""

import json
from typing import Any

import pytest
from jsonschema import validate

from hearth.shared.our_ids import is_our_signature
from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.sdk_conversations import (
    OSLO,
    TALKS,
    TOOLS,
    UTC,
    Sdks,
    Talk,
    dictation,
    written,
)
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.worker_processes.scripted_worker import FREEDOM

SLACK = 16  # tokens that a turn may prefill beyond what is new
SCHEMAS = {tool["name"]: tool["parameters"] for tool in TOOLS}
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
ANSWER = AnswerParts("", "It is warm in Rome, and it stays so.")
THOUGHTFUL = AnswerParts("They ask about Rome.\nI know that.", "Warm, as ever.")


@pytest.fixture(params=TALKS.values(), ids=list(TALKS))
def talk(request: pytest.FixtureRequest, sdks: Sdks) -> Talk:
    """An empty conversation, in each dialect."""
    made: Talk = request.param(sdks)
    return made


@STREAMED
def test_a_text_is_answered(talk: Talk, scripted: ScriptedServer, stream: bool) -> None:
    told = talk.user(dictation(ANSWER)).ask(stream=stream)
    assert (told.reasoning, told.content, told.calls) == ("", ANSWER.content, [])
    assert told.reason == "stop"
    asked = scripted.asked()[-1]
    assert (told.prompt, told.cached) == (len(asked.ids), asked.cached)
    assert told.thought == 0 < told.completion == len(asked.sampled) + 1, "and the turn's end"


@STREAMED
def test_thinking_is_told_apart_and_counted(talk: Talk, stream: bool) -> None:
    talk.options |= talk.thinking(True)
    told = talk.user(dictation(THOUGHTFUL)).ask(stream=stream)
    assert (told.reasoning, told.content) == (THOUGHTFUL.reasoning, THOUGHTFUL.content)
    assert 0 < told.thought < told.completion


@STREAMED
def test_thinking_is_signed_where_the_dialect_has_signatures(talk: Talk, stream: bool) -> None:
    told = talk.user(dictation(THOUGHTFUL)).ask(stream=stream)
    if talk.__class__ is TALKS["messages"]:
        assert told.kinds == ["thinking", "text"]
        assert is_our_signature(told.raw.content[0].signature)
    elif talk.__class__ is TALKS["responses"]:
        assert told.kinds == ["reasoning", "message"]
        assert is_our_signature(told.raw.output[0].encrypted_content)


@STREAMED
def test_thinking_that_is_off_is_told_to_the_template(
    talk: Talk, scripted: ScriptedServer, stream: bool
) -> None:
    talk.options |= talk.thinking(False)
    told = talk.user(dictation(ANSWER)).ask(stream=stream)
    assert (told.reasoning, told.content) == ("", ANSWER.content)
    assert "<think>\n\n</think>" in scripted.prompts()[-1][-40:]


@STREAMED
def test_one_tool_is_called(talk: Talk, stream: bool) -> None:
    parts = AnswerParts("I look.", "Let me see.", (OSLO,))
    told = talk.user(dictation(parts)).ask(stream=stream, tools=TOOLS)
    assert (told.reasoning, told.content.strip()) == ("I look.", "Let me see.")
    assert told.calls == [(OSLO.name, OSLO.arguments)]
    assert told.reason == "tool_calls"
    assert told.call_ids[0].isalnum()


@STREAMED
def test_several_tools_are_called_in_one_turn(talk: Talk, stream: bool) -> None:
    parts = AnswerParts("", "", (OSLO, UTC, OSLO))
    told = talk.user(dictation(parts)).ask(stream=stream, tools=TOOLS)
    assert told.calls == [(call.name, call.arguments) for call in parts.calls]
    assert len(set(told.call_ids)) == 3
    assert (told.content, told.reason) == ("", "tool_calls")


@STREAMED
def test_a_text_after_a_call_is_told(talk: Talk, stream: bool) -> None:
    text = written(AnswerParts("", "First.", (OSLO,)), "And then this.")
    told = talk.user(dictation(text)).ask(stream=stream, tools=TOOLS)
    assert told.content.split("\n") == ["First.", "And then this."]
    assert [name for name, _ in told.calls] == [OSLO.name]
    assert told.reason == "tool_calls"
    if told.kinds:
        assert [kind in ("text", "message") for kind in told.kinds] == [True, False, True]


@STREAMED
def test_a_call_is_forced(talk: Talk, stream: bool) -> None:
    """A random model writes it, held by the grammar alone."""
    talk.options |= talk.thinking(False)
    told = talk.user(FREEDOM).ask(stream=stream, tools=TOOLS, choice="required")
    assert told.calls and told.reason == "tool_calls"
    for name, arguments in told.calls:
        validate(arguments, SCHEMAS[name])


@STREAMED
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: str(tool["name"]))
def test_a_call_of_a_named_tool_is_forced(talk: Talk, tool: Any, stream: bool) -> None:
    talk.options |= talk.thinking(False)
    told = talk.user(FREEDOM).ask(stream=stream, tools=TOOLS, choice=tool["name"])
    assert {name for name, _ in told.calls} == {tool["name"]}
    for _, arguments in told.calls:
        validate(arguments, tool["parameters"])


@STREAMED
def test_no_call_is_made_where_none_is_wanted(talk: Talk, stream: bool) -> None:
    told = talk.user(dictation(AnswerParts("", "", (OSLO,)))).ask(
        stream=stream, tools=TOOLS, choice="none"
    )
    assert (told.calls, told.reason) == ([], "stop")
    assert '"Oslo"' in told.content, "what the model wrote is not lost"


@STREAMED
def test_an_answer_that_was_cut_off_says_so(talk: Talk, stream: bool) -> None:
    limit = "max_output_tokens" if talk.__class__ is TALKS["responses"] else "max_tokens"
    talk.options[limit] = 4
    told = talk.user(dictation(ANSWER)).ask(stream=stream)
    assert (told.reason, told.completion) == ("length", 4)
    assert told.content and ANSWER.content.startswith(told.content)


def test_a_stream_reports_what_a_whole_answer_does(talk: Talk, scripted: ScriptedServer) -> None:
    talk.user(dictation(AnswerParts("Hm.", "So.", (OSLO,))))
    rows = []
    for stream in (False, True):
        scripted.forget()
        told = talk.ask(stream=stream, tools=TOOLS)
        rows.append((told.prompt, told.cached, told.completion, told.thought, told.calls))
        del talk.history[1:]
    assert rows[0] == rows[1]
    assert rows[0][1] == 0, "the cache was empty"


@STREAMED
def test_the_same_request_again_is_served_from_the_cache(talk: Talk, stream: bool) -> None:
    talk.user(dictation(ANSWER))
    first = talk.ask(stream=stream)
    del talk.history[1:]
    second = talk.ask(stream=stream)
    assert second.prompt == first.prompt
    assert second.cached >= second.prompt - SLACK


@STREAMED
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
def test_an_answer_that_comes_back_is_never_read_again(
    talk: Talk, thinks: bool, stream: bool
) -> None:
    """Three turns of a tool loop: each prompt is the last one, its answer and what is new."""
    if not thinks:
        talk.options |= talk.thinking(False)

    def parts(text: str, *calls: Any) -> AnswerParts:
        return AnswerParts(f"About {text}." if thinks else "", text, calls)

    turns = (parts("First.", OSLO), parts("Second.", UTC, OSLO), parts("Third."))
    talk.system = "You know the weather. " * 20
    talk.user(dictation(*turns))
    before = talk.ask(stream=stream, tools=TOOLS)
    for _ in turns[1:]:
        for call_id in before.call_ids:
            talk.result(call_id, json.dumps({"degrees": 20}))
        told = talk.ask(stream=stream, tools=TOOLS)
        assert told.cached >= before.prompt + before.completion - SLACK
        before = told
    assert before.content == "Third."
    talk.user(dictation(ANSWER))
    last = talk.ask(stream=stream, tools=TOOLS)
    assert last.content == ANSWER.content
    assert last.cached >= before.prompt + before.completion - SLACK
