"""Checks what the specification's checklist names and no other test shows, line by line.

Shown elsewhere, or not ours:
  Streaming
    output matches JSONEncoder's byte for byte: that is Swift's. Ours: a stream adds up,
      tests/property/api/test_api_streams.py::
      test_the_chunks_of_a_chat_add_up_to_the_whole_completion
  Tool Use
    Gemma tool_code blocks: tests/unit/worker/formats/test_families_are_read.py::
      test_a_family_is_read_as_the_page_tells
    Qwen <tool_call> tags, and finish_reason "tool_calls": tests/e2e/sdks/test_sdk_answers.py::
      test_what_a_model_writes_is_told_in_every_dialect_with_what_it_cost
    Framework ToolCall events: mlx-swift-lm's. mlx-lm has parsers instead, held to their formats in
      tests/unit/worker/stream/test_answer_splitter.py::
      test_an_output_says_what_it_is_known_to_say
  Thinking Mode
    enable_thinking: false reaches the template: tests/e2e/sdks/test_sdk_answers.py::
      test_what_a_model_writes_is_told_in_every_dialect_with_what_it_cost
    on, think blocks appear: tests/e2e/sdks/test_sdk_answers.py::
      test_what_a_model_writes_is_told_in_every_dialect_with_what_it_cost
  Compatibility
    GET /v1/models with context windows: tests/e2e/sdks/test_sdk_dialects.py::
      test_models_are_listed_and_looked_up_in_both_sdks
    streamed and whole completions: tests/e2e/sdks/test_sdk_answers.py::
      test_what_a_model_writes_is_told_in_every_dialect_with_what_it_cost
    the model field swaps models: tests/e2e/server/test_models.py::
      test_models_change_places_and_answer_as_if_each_were_alone; a name that no model has is a 404:
      tests/e2e/sdks/test_sdk_errors.py::test_a_refusal_helps[a model of Messages]
    UI chat unaffected: not ours, there is no chat in the dashboard
  Disconnect Handling
    no Metal assertion failures: on whatever device it runs, tests/e2e/faults/test_faults.py::
      test_clients_that_leave_at_any_moment_leave_nothing_behind
"""

import json
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from hearth.worker.stream.answer_parts import AnswerParts
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import (
    OSLO,
    TALKS,
    TOOLS,
    UTC,
    ChatTalk,
    Sdks,
    dictation,
)
from tests.helpers.servers.scripted_server import ScriptedServer
from tests.helpers.servers.server import Server

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
ANSWER = AnswerParts("They ask.", "Warm.", (OSLO, UTC))
STOP_S_MAX = 0.2  # from a client's leaving to the last token drawn for it
PROMPT_FIELDS = (
    *("prompt_tokens", "input_tokens"),
    *("cache_creation_input_tokens", "cache_read_input_tokens"),
)
TRIES = 8  # of which one at least is undisturbed by other tests


def body_of(dialect: str, text: str, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "stream": True, **more}
    if dialect == "responses":
        return body | {"input": text}
    if dialect == "completions":
        return body | {"prompt": text}
    body["messages"] = [{"role": "user", "content": text}]
    return body | ({"max_tokens": 4_000} if dialect == "messages" else {})


def lines_of(server: ScriptedServer, dialect: str, body: dict[str, Any]) -> list[str]:
    answer = httpx.post(server.url + PATHS[dialect], json=body, timeout=60).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text.split("\n")


def chunks_of(server: ScriptedServer, text: str, **more: Any) -> list[Any]:
    """Return the chunks of a chat completion as they are on the wire."""
    rows = [line for line in lines_of(server, "chat", body_of("chat", text, **more)) if line]
    assert rows.pop() == "data: [DONE]"
    return [json.loads(row.removeprefix("data: ")) for row in rows]


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize("dialect", PATHS)
def test_sse_json_is_valid_and_parseable_by_standard_clients(
    scripted: ScriptedServer, dialect: str
) -> None:
    lines = lines_of(scripted, dialect, body_of(dialect, dictation(ANSWER)))
    kinds = {line.partition(":")[0] for line in lines if line}
    assert kinds <= {"event", "data"}, "no comments, no ids, nothing folded"
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    is_openai = dialect in ("chat", "completions")
    rows = [json.loads(row) for row in data[: -1 if is_openai else None]]
    assert all(type(row) is dict for row in rows)
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == ([] if is_openai else [row["type"] for row in rows])
    assert lines[-2:] == ["", ""], "the last event is ended too"


def test_role_delta_sent_once_at_stream_start(scripted: ScriptedServer) -> None:
    deltas = [row["choices"][0]["delta"] for row in chunks_of(scripted, dictation(ANSWER))]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta for delta in deltas if "role" in delta] == deltas[:1]


def test_tool_call_chunks_sent_correctly(scripted: ScriptedServer) -> None:
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    rows = chunks_of(scripted, dictation(ANSWER), tools=tools)
    pieces = [call for row in rows for call in row["choices"][0]["delta"].get("tool_calls", [])]
    heads = [piece for piece in pieces if "id" in piece]
    assert [(piece["index"], piece["function"]["name"]) for piece in heads] == [
        (0, OSLO.name),
        (1, UTC.name),
    ]
    assert all(piece["type"] == "function" for piece in heads)
    assert all(set(piece) == {"index", "function"} for piece in pieces if piece not in heads)
    assert all(early["index"] <= late["index"] for early, late in pairwise(pieces))
    for index, call in enumerate((OSLO, UTC)):
        texts = [piece["function"]["arguments"] for piece in pieces if piece["index"] == index]
        assert json.loads("".join(texts)) == call.arguments


def test_final_chunk_has_finish_reason_and_usage_stats(scripted: ScriptedServer) -> None:
    options = {"include_usage": True}
    *rows, usage = chunks_of(scripted, dictation(AnswerParts("", "Warm.")), stream_options=options)
    reasons = [row["choices"][0]["finish_reason"] for row in rows]
    assert reasons == [None] * (len(rows) - 1) + ["stop"]
    told = usage["usage"]
    assert usage["choices"] == []
    assert told["total_tokens"] == told["prompt_tokens"] + told["completion_tokens"]
    asked = scripted.asked()[-1]
    assert told["prompt_tokens"] == len(asked.ids)
    assert told["completion_tokens"] == len(asked.sampled) + 1, "and the one that ends the turn"


@pytest.mark.parametrize(
    ("dialect", "options", "places"),
    [
        ("chat", {}, []),
        ("chat", {"stream_options": {"include_usage": True}}, ["-1"]),
        ("completions", {}, []),
        ("completions", {"stream_options": {"include_usage": True}}, ["-1"]),
        ("responses", {}, ["response.completed"]),
        ("messages", {}, ["message_start", "message_delta"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_stream_has_its_usage_where_the_page_of_the_api_says(
    scripted: ScriptedServer, dialect: str, options: dict[str, Any], places: list[str]
) -> None:
    body = body_of(dialect, dictation(AnswerParts("", "Warm.")), **options)
    found = events_with_usage(lines_of(scripted, dialect, body))
    assert [place for place, _ in found] == places
    for _, usage in found[-1:]:
        prompt = sum(usage.get(name, 0) for name in PROMPT_FIELDS)
        assert prompt == len(scripted.asked()[-1].ids)
        assert usage["kv_cache"]["prefilled"] + usage["kv_cache"]["prefix_length"] == prompt


def events_with_usage(lines: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return each event that has a usage: its type, or its place from the end, and the usage."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    rows = [json.loads(text) for text in data]
    held = [row.get("response") or row.get("message") or row for row in rows]
    return [
        (row.get("type") or str(number - len(rows)), one["usage"])
        for number, (row, one) in enumerate(zip(rows, held, strict=True))
        if one.get("usage")
    ]


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_data_done_sent_at_end(scripted: ScriptedServer, dialect: str) -> None:
    lines = lines_of(scripted, dialect, body_of(dialect, dictation(AnswerParts("", "Warm."))))
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1


# ---------------------------------------------------------------- tools and thinking


@pytest.mark.parametrize("name", TALKS)
def test_tool_results_round_trip_correctly(sdks: Sdks, name: str) -> None:
    """The user sends the tool's result, and the model sees it in its context."""
    talk = TALKS[name](sdks)
    turns = (AnswerParts("", "", (OSLO, UTC)), AnswerParts("", "Warm."))
    first = talk.user(dictation(*turns)).ask(tools=TOOLS)
    for call_id, result in zip(first.call_ids, ("minus 40 degrees", "a quarter past"), strict=True):
        talk.result(call_id, result)
    assert talk.ask(tools=TOOLS).content == "Warm."
    prompt = sdks.server.prompts()[-1]
    assert prompt.index(OSLO.name) < prompt.index("minus 40 degrees") < prompt.index("a quarter")


def test_thinking_mode_off_no_think_blocks(server: Server) -> None:
    """A random model, whose template opens a think block unless it is told not to."""
    body = body_of("chat", "What?", model="local", max_tokens=40, temperature=1.0, stream=False)
    told = {}
    for on in (True, False):
        fields = body | {"enable_thinking": on}
        answer = httpx.post(server.url + PATHS["chat"], json=fields, timeout=60).json()
        told[on] = answer["choices"][0]["message"]
    assert told[True]["reasoning_content"] and not told[True]["content"]
    assert told[False]["content"] and "think>" not in told[False]["content"]
    assert not told[False].get("reasoning_content")


# ---------------------------------------------------------------- compatibility


def test_get_health_status_ok(scripted: ScriptedServer) -> None:
    assert scripted.get("/health")["status"] == "ok"


# ---------------------------------------------------------------- disconnects


@pytest.mark.parametrize("dialect", TALKS)
def test_client_disconnects_mid_stream_generation_stops_within_200_ms(
    scripted: ScriptedServer, dialect: str
) -> None:
    body = body_of(dialect, dictation("word " * 1_500))

    def drawn_for_s() -> float:
        """Return how long after its client had left an answer got its last token."""
        with httpx.stream("POST", scripted.url + PATHS[dialect], json=body, timeout=60) as answer:
            next(line for line in answer.iter_lines() if "word" in line)
        left = time.time()
        scripted.wait_until_idle()
        return scripted.drawn_at() - left

    assert any(-STOP_S_MAX < drawn_for_s() < STOP_S_MAX for _ in range(TRIES)), "it was amid it"


def test_partial_kv_cache_from_disconnected_request_is_stored_for_reuse(sdks: Sdks) -> None:
    server = sdks.server
    server.forget()
    said = dictation("partial " * 300)
    body = body_of("chat", said)
    with httpx.stream("POST", server.url + PATHS["chat"], json=body, timeout=60) as answer:
        next(line for line in answer.iter_lines() if "partial" in line)
    server.wait_until_idle()
    told = ChatTalk(sdks, max_tokens=2).user(said).ask()
    assert told.cached >= told.prompt - 16 > 300
