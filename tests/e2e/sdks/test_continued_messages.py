"""A last message of the assistant's is continued, in each dialect that has it."""

from typing import Any, Final

import anthropic
import ollama
import openai
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import (
    OSLO,
    TOOLS,
    ChatTalk,
    MessagesTalk,
    OllamaTalk,
    ResponsesTalk,
    Sdks,
    Talk,
    dictation,
)
from tests.helpers.servers.scripted_server import ScriptedServer

CONTINUING: Final = {"chat": ChatTalk, "messages": MessagesTalk, "ollama": OllamaTalk}
FIELD: Final[Any] = {"extra_body": {"continue_final_message": True}}  # a chat's, which asks for it
JOINTS: Final = (  # what the message begins with, and how it goes on
    ("1, 2,", " 3"),
    ("1, 2, ", "\n\n  3 \n"),
    ("Hi 🦊\u200d", "🦊\n"),
    ("def f(a):\n    ", "    return a"),
    ("a", "<think>\nno thought\n</think>\n\nb"),
    ("z </think> <tool_call><|im_end|>", ' {"x": 1}'),
)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(params=CONTINUING)
def continuing(request: pytest.FixtureRequest, sdks: Sdks) -> Talk:
    """A conversation whose last message is continued where it is the assistant's."""
    kind: Any = CONTINUING[request.param]
    made: Talk = kind(sdks, **(FIELD if request.param == "chat" else {}))
    return made


def begun(talk: Talk, question: str, text: Any) -> Talk:
    """Have the assistant begin `text` in answer to `question`, in a conversation of its own."""
    talk.history = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    return talk


@STREAMED
def test_the_answer_to_a_last_assistant_message_is_its_rest_and_nothing_else(
    continuing: Talk, sdks: Sdks, scripted: ScriptedServer, stream: bool
) -> None:
    for beginning, rest in JOINTS[:: 2 if stream else 1]:
        question = dictation("no turn of its own", rest, "more")
        told = begun(continuing, question, beginning).ask(stream=stream)
        assert (told.content, told.reasoning) == (rest, "")
        first = scripted.asked()[-1]
        assert scripted.prompts()[-1].endswith(
            f"<|im_start|>assistant\n<think>\n\n</think>\n\n{beginning}"
        )
        if isinstance(continuing, MessagesTalk):
            asked: Any = continuing.history[:2]
            count = sdks.claude.messages.count_tokens(model=MODEL, messages=asked)
            assert count.input_tokens == len(first.ids)
        echo = begun(type(continuing)(sdks), question, beginning + rest).user("and now")
        echo.ask(stream=stream)
        whole, following = [*first.ids, *first.sampled], scripted.asked()[-1]
        assert following.ids[: len(whole)] == whole and following.states == ["kept"]
        assert following.cached >= len(whole)


@STREAMED
def test_each_choice_continues_and_stops_see_only_what_is_new(sdks: Sdks, stream: bool) -> None:
    messages: Any = begun(ChatTalk(sdks), dictation("none", "b END c"), "a").history
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "n": 2, "stop": ["ab", "END"]}
    answer: Any = sdks.gpt.chat.completions.create(
        **body, stream=stream, extra_body=FIELD["extra_body"]
    )
    texts = ["", ""]
    for choice in (row for chunk in (answer if stream else [answer]) for row in chunk.choices):
        texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert texts == ["b ", "b "]


def test_a_call_behind_a_continued_message_is_a_call(continuing: Talk) -> None:
    begun(continuing, dictation("none", AnswerParts("", "", (OSLO,))), "Let me look.")
    told = continuing.ask(tools=TOOLS)
    assert told.calls == [(OSLO.name, OSLO.arguments)] and "<tool_call>" not in told.content


def test_what_contradicts_a_continued_message_is_a_400(continuing: Talk) -> None:
    """What its API itself contradicts is in tests/data/api; the worker refuses a grammar."""
    begun(continuing, dictation("none"), "a").options |= continuing.formed({"type": "object"})
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError, ollama.ResponseError)):
        continuing.ask()


@pytest.mark.parametrize(
    ("kind", "text"),
    [(MessagesTalk, " \n"), (OllamaTalk, ""), (ChatTalk, "a"), (ResponsesTalk, "a")],
)
def test_what_is_no_beginning_is_followed_by_a_turn_of_its_own(
    kind: type[Talk], text: str, sdks: Sdks, scripted: ScriptedServer
) -> None:
    begun(kind(sdks), dictation("none", "new"), text).ask()
    assert scripted.prompts()[-1].endswith("<|im_end|>\n<|im_start|>assistant\n")


@STREAMED
def test_log_probabilities_are_the_content_without_thinking_and_calls(
    sdks: Sdks, stream: bool
) -> None:
    said = AnswerParts("Hello 🦊", "Hello 🦊 wörld\n\n日本", (OSLO,))
    chat: Any = ChatTalk(sdks, logprobs=True).user(dictation(said)).ask(stream=stream, tools=TOOLS)
    rows = chat.raw.choices[0].logprobs.content
    asked: Any = {"model": MODEL, "input": dictation(said), "stream": stream}
    wanted: Any = ["message.output_text.logprobs"]
    answer: Any = sdks.gpt.responses.create(
        **asked, tools=ResponsesTalk(sdks).tools(TOOLS), include=wanted
    )
    response = [*answer][-1].response if stream else answer
    (message,) = [item for item in response.output if item.type == "message"]
    for entries in (rows, message.content[0].logprobs):
        assert (
            b"".join(bytes(row.bytes) for row in entries).decode() == chat.content == said.content
        )
