"""The official SDKs against the running server: what an answer says, in every dialect alike.

The model's words are dictated at token level (tests/data/api/dictated_answers.yaml), or it is left
to write what it likes under a grammar; all else is real.
"""

import json
from typing import Any

import pytest
from jsonschema import validate

from hearth.shared.our_ids import is_our_signature
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from tests.helpers.by_day import by_day
from tests.helpers.cases import cases
from tests.helpers.clients.sdk_conversations import (
    OSLO,
    TALKS,
    TOOLS,
    UTC,
    OllamaTalk,
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
THOUGHTFUL = AnswerParts("They ask about Rome.\nI know that.", "Warm, as ever.")


@pytest.fixture(params=TALKS.values(), ids=list(TALKS))
def talk(request: pytest.FixtureRequest, sdks: Sdks) -> Talk:
    """An empty conversation, in each dialect whose API has a choice of tools."""
    made: Talk = request.param(sdks)
    return made


@pytest.fixture(params=[*TALKS.values(), OllamaTalk], ids=[*TALKS, "ollama"])
def any_talk(request: pytest.FixtureRequest, sdks: Sdks) -> Talk:
    made: Talk = request.param(sdks)
    return made


@STREAMED
@pytest.mark.parametrize("case", cases("api/dictated_answers.yaml"))
def test_what_a_model_writes_is_told_in_every_dialect_with_what_it_cost(
    any_talk: Talk, case: dict[str, Any], stream: bool, scripted: ScriptedServer
) -> None:
    turn = {"reasoning": "", "content": "", "calls": []} | case["turn"]
    parts = AnswerParts(turn["reasoning"], turn["content"], [ToolCall(*c) for c in turn["calls"]])
    any_talk.options |= any_talk.thinking(case["thinks"]) if "thinks" in case else {}
    any_talk.options |= any_talk.limit(case["tokens_max"]) if "tokens_max" in case else {}
    said = dictation(written(parts, case.get("after", "")))
    told = any_talk.user(said).ask(stream=stream, tools=TOOLS)
    assert told.reasoning == turn["reasoning"]
    assert told.content.strip() == case.get("content", turn["content"])
    assert told.calls == [tuple(each) for each in turn["calls"]]
    assert told.reason == case.get("reason", "tool_calls" if turn["calls"] else "stop")
    assert len(set(told.call_ids)) == len(told.calls) and "".join(["c", *told.call_ids]).isalnum()
    asked = scripted.asked()[-1]
    assert scripted.prompts()[-1].endswith(case.get("prompt_ends", ""))
    with_its_end = len(asked.sampled) + 1
    assert (told.prompt, told.completion) == (len(asked.ids), case.get("tokens_max", with_its_end))
    if any_talk.__class__ is not OllamaTalk:
        assert told.cached == asked.cached
        assert (0 < told.thought < told.completion) == bool(turn["reasoning"])


@STREAMED
@pytest.mark.parametrize(
    ("dialect", "kinds"),
    [("messages", ["thinking", "text"]), ("responses", ["reasoning", "message"])],
)
def test_thinking_is_signed_where_the_dialect_has_signatures_and_each_anew(
    dialect: str, kinds: list[str], sdks: Sdks, stream: bool
) -> None:
    seals = []
    for _ in range(2):
        told = TALKS[dialect](sdks).user(dictation(THOUGHTFUL)).ask(stream=stream)
        assert told.kinds == kinds
        first = told.raw.content[0] if dialect == "messages" else told.raw.output[0]
        seals.append(first.signature if dialect == "messages" else first.encrypted_content)
    assert all(map(is_our_signature, seals)) and len(set(seals)) == 2


@STREAMED
@pytest.mark.parametrize("choice", by_day(["required", *SCHEMAS], ["required"]))
def test_a_call_is_forced(talk: Talk, choice: str, stream: bool) -> None:
    """A random model writes it, held by the grammar alone."""
    talk.options |= talk.thinking(False)
    told = talk.user(FREEDOM).ask(stream=stream, tools=TOOLS, choice=choice)
    assert told.calls and told.reason == "tool_calls"
    for name, arguments in told.calls:
        assert choice in ("required", name)
        validate(arguments, SCHEMAS[name])


@STREAMED
def test_no_call_is_made_where_none_is_wanted(talk: Talk, stream: bool) -> None:
    talk.user(dictation(AnswerParts("", "", (OSLO,))))
    told = talk.ask(stream=stream, tools=TOOLS, choice="none")
    assert (told.calls, told.reason) == ([], "stop")
    assert '"Oslo"' in told.content, "what the model wrote is not lost"


@STREAMED
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
def test_an_answer_that_comes_back_is_never_read_again(
    any_talk: Talk, thinks: bool, stream: bool, scripted: ScriptedServer
) -> None:
    """Three turns of a tool loop: each prompt is the last one, its answer and what is new."""
    if not thinks:
        any_talk.options |= any_talk.thinking(False)

    def parts(text: str, *calls: Any) -> AnswerParts:
        return AnswerParts(f"About {text}." if thinks else "", text, calls)

    turns = (parts("First.", OSLO), parts("Second.", UTC, OSLO), parts("Third."))
    any_talk.system = "You know the weather. " * 20
    before = any_talk.user(dictation(*turns)).ask(stream=stream, tools=TOOLS)
    for turn in (*turns[1:], None):
        for call_id in before.call_ids:
            any_talk.result(call_id, json.dumps({"degrees": 20}))
        if turn is None:
            any_talk.user(dictation(parts("And on.")))
        told = any_talk.ask(stream=stream, tools=TOOLS)
        assert told.content == (turn.content if turn else "And on.")
        assert scripted.asked()[-1].cached >= before.prompt + before.completion - SLACK
        before = told
