"""Whatever comes as Ollama's chat or generate: a request that can be answered, or a refusal."""

import asyncio
from typing import Any

import orjson
from hypothesis import given, settings, strategies as st

from hearth.proxy.api.answer_frames import frames
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.api.ollama import generate_context, ollama_events, ollama_request
from hearth.proxy.api.ollama.ollama_request import CHAT, GENERATE
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Submit, decode, encode
from tests.helpers.clients.api_events import Scripted, called, done, more, said, thought

FIELDS = (
    "role content thinking images tool_calls tool_name tool_call_id function name arguments id "
    "prompt suffix system template context raw format options stream think keep_alive logprobs "
    "top_logprobs tools type parameters properties num_predict num_ctx temperature top_k top_p "
    "min_p seed stop repeat_penalty presence_penalty frequency_penalty"
)
WORDS = "user assistant system tool function json 5m 0 -1 true low max high object iVBO"
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats(-2, 2)
    | st.sampled_from(WORDS.split())
    | st.text(max_size=4)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=5)
    ),
    max_leaves=20,
)
ROLES = st.sampled_from(("system", "user", "assistant", "tool", "User"))
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": st.just("f"), "arguments": JSON})}
    ),
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES},
    optional={
        "content": st.text(max_size=5) | JSON,
        "tool_calls": CALLS | JSON,
        "thinking": st.text(max_size=3),
        "tool_name": st.sampled_from(("f", "g")),
        "images": st.lists(st.sampled_from(WORDS.split()), max_size=2) | JSON,
    },
)
OPTIONAL: dict[str, Any] = {
    "options": st.dictionaries(st.sampled_from(FIELDS.split()), SCALARS, max_size=4),
    "format": st.sampled_from(("", "json", {}, {"type": "object"})) | JSON,
    "think": SCALARS,
    "stream": st.booleans(),
    "keep_alive": SCALARS,
}
BODIES = st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=3)
ANSWER = (thought("t"), said("s"), called("c", "f", '{"x"'), more(": 1}"), done("tool_calls"))


def check(parse: Any, body: dict[str, Any]) -> None:
    dialect = CHAT if parse is ollama_request.parse_chat else GENERATE
    try:
        ollama_request.unloads(dialect, body)
        request = parse(body)
    except RequestError as error:
        assert 400 <= error.status < 500
        assert str(error)
        return
    assert request.dialect == dialect
    submit = Submit("r", request.prompt, request.sampling, request.constraints)
    assert decode(encode(submit)) == submit

    async def answer() -> tuple[dict[str, Any], list[Any]]:
        whole = await ollama_events.whole(AdmittedRequest(request, "m", Scripted(*ANSWER)))
        admitted = AdmittedRequest(request, "m", Scripted(*ANSWER))
        lines = frames(admitted, ollama_events.OllamaWriter(admitted))
        return orjson.loads(orjson.dumps(whole)), [orjson.loads(line) async for line in lines]

    whole, lines = asyncio.run(answer())
    assert [row["done"] for row in lines] == [False] * (len(lines) - 1) + [True]
    parts = [row["message"] if dialect == CHAT else row for row in lines]
    (told,) = [whole["message"] if dialect == CHAT else whole]
    text = "content" if dialect == CHAT else "response"
    assert "".join(part[text] for part in parts) == told[text] == "s"
    assert [call for part in parts for call in part.get("tool_calls", ())] == told["tool_calls"]


@settings(max_examples=150)
@given(st.lists(MESSAGES, max_size=4), BODIES, st.fixed_dictionaries({}, optional=OPTIONAL))
def test_any_chat_is_answered_or_refused(rows: list[Any], odd: Any, known: Any) -> None:
    check(ollama_request.parse_chat, odd | known | {"messages": rows})


@settings(max_examples=150)
@given(st.text(max_size=5), BODIES, st.fixed_dictionaries({}, optional=OPTIONAL))
def test_any_prompt_is_answered_or_refused(prompt: str, odd: Any, known: Any) -> None:
    check(ollama_request.parse_generate, odd | known | {"prompt": prompt})


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(("system", "user", "assistant")), TEXTS)), TEXTS)
def test_a_context_brings_back_what_was_said(rows: list[tuple[str, str]], answer: str) -> None:
    messages = [{"role": role, "content": text} for role, text in rows]
    numbers = orjson.loads(orjson.dumps(generate_context.context_of(messages, answer)))
    back = generate_context.messages_of(numbers)
    assert back == [*messages, {"role": "assistant", "content": answer}]


@given(JSON | st.lists(st.integers(-2, 2**25) | st.integers(2**62, 2**64), max_size=30))
def test_any_other_context_is_refused_with_words(context: Any) -> None:
    try:
        assert generate_context.messages_of(context) == []
        assert not context
    except RequestError as error:
        assert error.param == "context"
