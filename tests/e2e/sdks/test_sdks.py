"""The official SDKs against the running server, in all three dialects."""

import codecs
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.helpers.servers.server import Server

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about prefix caches."}]
# A random model that thinks would do nothing else.
PLAIN: dict[str, Any] = {"repetition_penalty": 1.0, "enable_thinking": False}
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": PLAIN}
# Some releases of the Anthropic SDK have no `temperature` argument.
BODY: dict[str, Any] = {"extra_body": {"temperature": 0, **PLAIN}}
TOOL = {
    "name": "read_file",
    "description": "Read one file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        yield claude


def test_models_lists_the_model_with_its_context(client: openai.OpenAI) -> None:
    (model,) = [m for m in client.models.list() if m.id == "local"]
    assert model.model_dump()["context_length"] == 131072


def test_chat_streams_what_it_answers_at_once(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="local", messages=MESSAGES, max_tokens=40, **GREEDY
    )
    stream = client.chat.completions.create(
        model="local",
        messages=MESSAGES,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == ["length"] == [whole.choices[0].finish_reason]
    (usage,) = [c.usage for c in chunks if c.usage]
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 5
    assert chunks[0].choices[0].delta.role == "assistant"


def test_the_prompt_count_is_exact_and_tools_are_part_of_it(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="local", messages=MESSAGES, max_tokens=1)
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    tooled = client.chat.completions.create(
        model="local", messages=MESSAGES, max_tokens=1, tools=tools
    )
    assert plain.usage is not None and tooled.usage is not None
    assert tooled.usage.prompt_tokens > plain.usage.prompt_tokens + 20


def test_a_tool_loop_goes_through(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function"}
    history: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "read_file", "arguments": '{"path":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42 lines"},
    ]
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    answer = client.chat.completions.create(
        model="local", messages=history, tools=tools, max_tokens=5
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 5


def characters(written: bytes) -> str:
    """The text of bytes that a model wrote; what is not yet a character at the end is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(written)


def test_logprobs_name_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, **GREEDY}
    whole = client.chat.completions.create(model="local", messages=MESSAGES, **arguments)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 12
    written = b"".join(bytes(e.bytes or []) for e in entries)
    assert (whole.choices[0].message.content or "") == characters(written)
    for e in entries:
        assert len(e.top_logprobs) == 3
        assert e.top_logprobs[0].logprob == pytest.approx(e.logprob)  # greedy took the likeliest
        assert e.logprob <= 0
    chunks = client.chat.completions.create(
        model="local", messages=MESSAGES, stream=True, **arguments
    )
    streamed = [
        e.token
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for e in c.choices[0].logprobs.content or []
    ]
    assert streamed == [e.token for e in entries]


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="local", messages=MESSAGES, max_tokens=60, **GREEDY
    )
    text = whole.choices[0].message.content or ""
    stop = text[20:26]
    cut = client.chat.completions.create(
        model="local", messages=MESSAGES, max_tokens=60, stop=[stop], **GREEDY
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str | None:
        reply = client.chat.completions.create(
            model="local",
            messages=MESSAGES,
            max_tokens=30,
            temperature=1.5,
            seed=seed,
            extra_body=PLAIN,
        )
        return reply.choices[0].message.content

    assert answer(1) == answer(1) != answer(2)


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    """Anthropic counts apart what was read from the cache."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_anthropic_messages_stream_what_they_answer_at_once(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    arguments: dict[str, Any] = {
        "model": "claude-of-the-day",
        "messages": MESSAGES,
        "max_tokens": 30,
        **BODY,
    }
    whole = claude.messages.create(**arguments)
    with claude.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 30
    chat = client.chat.completions.create(model="local", messages=MESSAGES, max_tokens=30, **GREEDY)
    assert text == chat.choices[0].message.content
    assert chat.usage is not None and prompt_tokens(whole.usage) == chat.usage.prompt_tokens


def test_anthropic_names_the_stop_sequence_and_counts_exactly(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model="claude-x", messages=MESSAGES, max_tokens=40, **BODY)
    text = whole.content[0].text  # type: ignore[union-attr]
    cut = claude.messages.create(
        model="claude-x",
        messages=MESSAGES,
        max_tokens=40,
        stop_sequences=[text[10:14]],
        **BODY,
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text[10:14])
    counted = claude.messages.count_tokens(
        model="claude-x", messages=MESSAGES, extra_body={"enable_thinking": False}
    )
    assert counted.input_tokens == prompt_tokens(whole.usage)


def test_responses_stream_text(client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model="local",
        input="Tell me about prefix caches.",
        max_output_tokens=25,
        stream=True,
        **GREEDY,
    )
    events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in (
        "response.completed",
        "response.incomplete",
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final: Any = events[-1]
    assert final.response.output_text == text and text
    assert final.response.usage.output_tokens == 25
    whole = client.chat.completions.create(
        model="local", messages=MESSAGES, max_tokens=25, **GREEDY
    )
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("messages", "status", "says"),
    [
        ([], 400, "empty"),
        ([{"role": "wizard", "content": "x"}], 400, "wizard"),
        ([{"role": "user", "content": "x" * 10_000_000}], 400, "10,0"),
        ([{"role": "user", "content": "word " * 200_000}], 400, "131,"),
    ],
    ids=["empty", "role", "ten megabytes", "longer than the context"],
)
def test_bad_messages_are_refused_with_what_helps(
    client: openai.OpenAI, messages: list[Any], status: int, says: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="local", messages=messages)
    assert caught.value.status_code == status
    assert says in str(caught.value.body)
    fine = client.chat.completions.create(model="local", messages=MESSAGES, max_tokens=2)
    assert fine.choices


def test_an_unknown_model_is_a_404_that_names_what_there_is(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="llama-99", messages=MESSAGES)
    assert "local" in str(caught.value.body)
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.messages.create(model="llama-99", messages=MESSAGES, max_tokens=3)
    assert refused.value.body["type"] == "error"  # type: ignore[index]
