"""A last message of the assistant's is continued, in each dialect that has it, whole and streamed.

And log probabilities are the content, in each dialect that has them.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import OSLO, WEATHER, dictation
from tests.helpers.servers.scripted_server import ScriptedServer

PATHS: Final = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "ollama_chat": "/api/chat",
    "responses": "/v1/responses",
}
NAMES: Final = {  # of content and of thinking
    "chat": ("content", "reasoning_content"),
    "messages": ("text", "thinking"),
    "ollama_chat": ("content", "thinking"),
}
CONTINUING: Final = ("chat", "messages", "ollama_chat")
NEXT: Final = {"role": "user", "content": "and now"}
FUNCTION: Final = {"type": "function", "function": WEATHER}
CALL: Final = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
JOINTS: Final = (  # what the message begins with, and how it goes on
    ("1, 2,", " 3"),
    ("1, 2, ", "\n\n  3 \n"),
    ("Hi 🦊\u200d", "🦊\n"),
    ("def f(a):\n    ", "    return a"),
    ("a", "<think>\nno thought\n</think>\n\nb"),
    ("z </think> <tool_call><|im_end|>", ' {"x": 1}'),
)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def asked(*turns: AnswerParts | str) -> dict[str, Any]:
    return {"role": "user", "content": dictation(*turns)}


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=60) as made:
        yield made


def body_of(dialect: str, messages: list[Any], stream: bool = False, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "stream": stream, **more}
    if dialect == "responses":
        return body | {"input": messages}
    return body | {"messages": messages} | ({"max_tokens": 99} if dialect == "messages" else {})


def continuing(
    dialect: str, messages: list[Any], stream: bool = False, **more: Any
) -> dict[str, Any]:
    field = {"continue_final_message": True} if dialect == "chat" else {}
    return body_of(dialect, messages, stream, **field, **more)


def under(value: Any, name: str) -> Iterator[Any]:
    """Yield what stands under `name`, wherever, in answers or in the events of a stream."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == name and not isinstance(inner, dict):
            yield inner
        elif isinstance(inner, dict | list):
            yield from under(inner, name)


def told(client: httpx.Client, dialect: str, body: dict[str, Any]) -> tuple[str, str, bytes]:
    """Return the content, the thinking, and the bytes of the log probabilities' entries."""
    answer = client.post(PATHS[dialect], json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    if dialect == "responses":  # which have each text more than once, and thinking's as well
        key, kind = (
            ("delta", "response.output_text.delta") if body["stream"] else ("text", "message")
        )
        found = rows if body["stream"] else rows[0]["output"]
        rows, said, thought = [row for row in found if row.get("type") == kind], key, ""
    else:
        said, thought = NAMES[dialect]
    content, thinking = (
        "".join(text for text in under(rows, name) if isinstance(text, str))
        for name in (said, thought)
    )
    return content, thinking, b"".join(map(bytes, under(rows, "bytes")))


@STREAMED
@pytest.mark.parametrize("dialect", CONTINUING)
def test_the_answer_to_a_last_assistant_message_is_its_rest_and_nothing_else(
    client: httpx.Client, scripted: ScriptedServer, dialect: str, stream: bool
) -> None:
    for begun, rest in JOINTS[:: 2 if stream else 1]:
        question = asked("no turn of its own", rest, "more")
        body = continuing(dialect, [question, assistant(begun)], stream)
        assert told(client, dialect, body)[:2] == (rest, "")
        first = scripted.asked()[-1]
        prompt = scripted.prompts()[-1]
        assert prompt.endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{begun}")
        if dialect == "messages":
            count = client.post("/v1/messages/count_tokens", json=body).json()
            assert count["input_tokens"] == len(first.ids)
        echo = [question, assistant(begun + rest), NEXT]
        told(client, dialect, body_of(dialect, echo, stream))
        whole, following = [*first.ids, *first.sampled], scripted.asked()[-1]
        assert following.ids[: len(whole)] == whole and following.states == ["kept"]
        assert following.cached >= len(whole)


@pytest.mark.parametrize("dialect", CONTINUING)
def test_a_continued_message_is_read_cold_and_warm_alike(
    client: httpx.Client, scripted: ScriptedServer, dialect: str
) -> None:
    messages = [asked("none", " so " + dialect), assistant("it was")]
    answers = [told(client, dialect, continuing(dialect, messages)) for _ in range(2)]
    cold, warm = scripted.asked()[-2:]
    assert answers[0] == answers[1] and cold.ids == warm.ids
    assert warm.cached > cold.cached


@STREAMED
def test_each_choice_continues_and_stops_see_only_what_is_new(
    client: httpx.Client, stream: bool
) -> None:
    messages = [asked("none", "b END c"), assistant("a")]
    body = continuing("chat", messages, stream, n=2, stop=["ab", "END"])
    assert told(client, "chat", body)[0] in ("b b ", "bb  ")


@pytest.mark.parametrize("dialect", CONTINUING)
def test_a_call_behind_a_continued_message_is_a_call(client: httpx.Client, dialect: str) -> None:
    messages = [asked("none", AnswerParts("", "", (OSLO,))), assistant("Let me look.")]
    own = {"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}
    tools = [own if dialect == "messages" else FUNCTION]
    answer = client.post(PATHS[dialect], json=continuing(dialect, messages, tools=tools))
    assert '"Oslo"' in answer.text.replace("\\", "") and "<tool_call>" not in answer.text


@pytest.mark.parametrize(
    ("dialect", "last", "more"),
    [
        ("chat", assistant("a"), {"add_generation_prompt": True}),
        ("chat", assistant("a"), {"response_format": {"type": "json_object"}}),
        ("chat", assistant("a"), {"tools": [FUNCTION], "tool_choice": "required"}),
        ("chat", assistant("a", tool_calls=[CALL]), {}),
        ("chat", NEXT, {}),
        ("chat", assistant("a"), {"continue_final_message": "true"}),
        ("ollama_chat", assistant("a"), {"format": "json"}),
        (
            "messages",
            assistant("a"),
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
    ],
)
def test_what_contradicts_a_continued_message_is_a_400(
    client: httpx.Client, dialect: str, last: dict[str, Any], more: dict[str, Any]
) -> None:
    body = {**continuing(dialect, [asked("none"), last]), **more}
    assert client.post(PATHS[dialect], json=body).status_code == 400


@pytest.mark.parametrize(
    ("dialect", "last"),
    [
        ("messages", assistant("")),
        ("messages", assistant(" \n")),
        ("messages", assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}])),
        ("messages", assistant([{"type": "tool_use", "id": "t", "name": "f", "input": {}}])),
        ("ollama_chat", assistant("")),
        ("ollama_chat", {"role": "assistant", "tool_calls": [CALL]}),
        ("chat", assistant("a")),
        ("responses", assistant("a")),
    ],
)
def test_what_is_no_beginning_is_followed_by_a_turn_of_its_own(
    client: httpx.Client, scripted: ScriptedServer, dialect: str, last: dict[str, Any]
) -> None:
    answer = client.post(PATHS[dialect], json=body_of(dialect, [asked("none", "new"), last]))
    assert answer.status_code == 200, answer.text
    assert scripted.prompts()[-1].endswith("<|im_end|>\n<|im_start|>assistant\n")


@STREAMED
@pytest.mark.parametrize("dialect", ["chat", "ollama_chat", "responses"])
def test_log_probabilities_are_the_content_without_thinking_and_calls(
    client: httpx.Client, dialect: str, stream: bool
) -> None:
    said = AnswerParts("Hello 🦊", "Hello 🦊 wörld\n\n日本", (OSLO,))
    wanted: dict[str, Any] = {"logprobs": True, "tools": [FUNCTION]}
    if dialect == "responses":
        tool = {"type": "function", **WEATHER}
        include = ["message.output_text.logprobs"]
        wanted = {"include": include, "tools": [tool]}
    content, _, entries = told(client, dialect, body_of(dialect, [asked(said)], stream, **wanted))
    assert content == said.content == entries.decode()
