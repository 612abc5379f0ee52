"""Bodies of Ollama's chat and generate become our request, or a refusal that names the field."""

from typing import Any

import orjson
import pytest

from hearth.proxy.api.ollama import generate_context, ollama_request
from hearth.proxy.api.ollama.ollama_request import CHAT, GENERATE, parse_chat, parse_generate
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.thinking import ThinkingWish
from hearth.shared.wire_messages import Constraints

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}


def chat(*rows: Any, **fields: Any) -> ParsedRequest:
    return parse_chat({"model": "m", "messages": list(rows) or [USER], **fields})


def generate(prompt: str = "hi", **fields: Any) -> ParsedRequest:
    return parse_generate({"model": "m", "prompt": prompt, **fields})


def refused(parse: Any, *rows: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*rows, **fields)
    assert caught.value.status == 400
    return caught.value


def test_answers_are_streamed_unless_the_client_says_no() -> None:
    assert chat().stream and generate().stream
    assert not chat(stream=False).stream and not generate(raw=True, stream=False).stream


def test_results_go_to_the_calls_of_the_tools_that_they_name() -> None:
    names = ("f", "g", "f")
    calls = [{"function": {"name": name, "arguments": {}}} for name in names]
    said = [("g", "second"), ("f", "first"), ("f", "third")]
    results = [{"role": "tool", "tool_name": name, "content": text} for name, text in said]
    rows = chat(USER, {"role": "assistant", "tool_calls": calls}, *results).prompt.messages
    ids = [f"messages1toolcalls{number}" for number in (1, 0, 2)]
    assert [row.get("tool_call_id") for row in rows[2:]] == ids
    assert not any("name" in row for row in rows)


def test_results_without_a_name_go_to_the_calls_in_order_and_ids_stay() -> None:
    calls = [{"id": i, "function": {"name": "f", "arguments": {}}} for i in ("a", "b", "c")]
    results = [{"role": "tool", "content": "1", "tool_call_id": "b"}]
    results += [{"role": "tool", "content": text} for text in "23"]
    rows = chat(USER, {"role": "assistant", "tool_calls": calls}, *results).prompt.messages
    assert [row.get("tool_call_id") for row in rows[2:]] == ["b", "a", "c"]


def test_options_are_the_sampling_fields_of_the_other_apis() -> None:
    options = {
        **{"temperature": 0.5, "top_k": 40.0, "top_p": 0.9, "min_p": 0.1, "seed": 7},
        **{"stop": ["x"], "repeat_penalty": 1.1, "presence_penalty": 0.2},
        **{"frequency_penalty": 0.3, "num_predict": 12},
        **{"num_ctx": 2048, "num_gpu": 99, "mirostat": 2, "use_mmap": None, "repeat_last_n": 64},
    }
    for sampling in (chat(options=options).sampling, generate(options=options, raw=True).sampling):
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 40, 0.9)
        assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 7, ["x"])
        assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.2)
        assert (sampling.frequency_penalty, sampling.max_tokens) == (0.3, 12)


@pytest.mark.parametrize("limit", [0, -1, -2, None])
def test_a_limit_that_is_none_is_none(limit: Any) -> None:
    assert chat(options={"num_predict": limit}).sampling.max_tokens is None


@pytest.mark.parametrize(
    ("think", "wish"),
    [
        (None, ThinkingWish()),
        (True, ThinkingWish(True)),
        (False, ThinkingWish(False)),
        ("low", ThinkingWish(True, "low")),
        ("max", ThinkingWish(True, "max")),
    ],
)
def test_think_is_on_off_or_a_level(think: Any, wish: ThinkingWish) -> None:
    assert chat(think=think).prompt.thinking == wish
    assert generate(think=think).prompt.thinking == wish


def test_a_format_is_json_or_a_schema() -> None:
    assert chat(format="").constraints == chat(format=None).constraints == Constraints()
    assert chat(format="json").constraints == Constraints(is_json=True)
    assert generate(format=SCHEMA).constraints == Constraints(is_json=True, schema=SCHEMA)
    assert refused(chat, format="yaml").param == "format"


def test_images_stand_before_the_words_and_are_named_as_the_client_has_them() -> None:
    row = {"role": "user", "content": "what?", "images": ["iVBO", "data:image/gif;base64,R0lG"]}
    (message,) = chat(row).prompt.messages
    *images, text = message["content"]
    assert [part["url"] for part in images] == [
        "data:image/png;base64,iVBO",
        "data:image/gif;base64,R0lG",
    ]
    assert [part["param"] for part in images] == ["messages[0].images[0]", "messages[0].images[1]"]
    assert text == {"type": "text", "text": "what?"}
    (message,) = generate("", images=["iVBO"]).prompt.messages
    assert [part["param"] for part in message["content"]] == ["images[0]"]
    assert refused(chat, {**row, "images": [7]}).param == "messages[0].images[0]"


def test_a_prompt_goes_behind_its_system_message_and_its_context() -> None:
    before = [{"role": "system", "content": "old"}, {"role": "user", "content": "I am Al."}]
    context = generate_context.context_of(before, "Hello Al.")
    rows = generate("Who?", context=context).prompt.messages
    assert [row["content"] for row in rows] == ["old", "I am Al.", "Hello Al.", "Who?"]
    rows = generate("Who?", context=context, system="new").prompt.messages
    assert [row["content"] for row in rows] == ["new", "I am Al.", "Hello Al.", "Who?"]


def test_a_raw_prompt_goes_to_the_model_as_it_is() -> None:
    request = generate("<|im_start|>x", raw=True, logprobs=True, top_logprobs=3)
    assert request.prompt.text == "<|im_start|>x"
    assert not request.prompt.messages
    assert request.sampling.top_logprobs == 3
    for name, value in (("images", ["iVBO"]), ("format", "json"), ("context", [1])):
        assert refused(generate, raw=True, **{name: value}).param == name


@pytest.mark.parametrize(
    ("field", "value"), [("suffix", "x"), ("template", "{{ .Prompt }}"), ("context", [1, 2, 3])]
)
def test_what_is_not_done_here_is_refused_with_a_remedy(field: str, value: Any) -> None:
    error = refused(generate, **{field: value})
    assert error.param == field
    assert "Leave it out" in str(error) or "raw: true" in str(error)


@pytest.mark.parametrize("rows", [[["robot", "x"]], [["user", {}]], [["user"]], {"user": "x"}, 7])
def test_a_context_that_holds_no_conversation_is_refused(rows: Any) -> None:
    text = orjson.dumps(rows)
    text += b" " * (-len(text) % 3)
    numbers = [int.from_bytes(text[at : at + 3], "big") for at in range(0, len(text), 3)]
    assert refused(generate, context=numbers).param == "context"


def test_only_a_body_without_a_question_loads_the_model() -> None:
    for body in ({}, {"messages": []}, {"messages": None}):
        assert not ollama_request.is_question(CHAT, body)
    assert ollama_request.is_question(CHAT, {"messages": [USER]})
    for body in ({}, {"prompt": ""}):
        assert not ollama_request.is_question(GENERATE, body)
    assert ollama_request.is_question(GENERATE, {"images": ["iVBO"]})
    assert ollama_request.is_question("chat", {})


@pytest.mark.parametrize(
    ("value", "unloads"),
    [
        *((0, True), (0.0, True), ("0", True), ("0s", True), ("0h0m", True)),
        *((None, False), (-1, False), ("-1", False), (300, False), ("5m", False)),
        *(("1h30m", False), ("0.5s", False), ("-1m", False)),
    ],
)
def test_a_keep_alive_of_nothing_unloads(value: Any, unloads: bool) -> None:
    assert ollama_request.unloads(CHAT, {"keep_alive": value}) is unloads
    assert not ollama_request.unloads("chat", {"keep_alive": 0}), "no other API has it"


@pytest.mark.parametrize("value", ["soon", "", "5 minutes", True, [], "m"])
def test_a_keep_alive_that_is_no_duration_is_refused(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ollama_request.unloads(CHAT, {"keep_alive": value})
    assert caught.value.param == "keep_alive"
