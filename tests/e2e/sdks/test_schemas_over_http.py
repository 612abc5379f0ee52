"""Schemas in each dialect, whole and streamed: what is accepted holds, and no process is left."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.servers.server import WAIT_S_MAX, Server

ASKED = [{"role": "user", "content": "Hi"}]
CITY = {"enum": ["Oslo", "Rome"]}
NEVER = {"type": "string", "pattern": "(?=a)b"}
DIALECTS = ("chat", "messages", "responses", "ollama chat", "ollama generate")
CALLING = DIALECTS[:3]  # Ollama has no choice of a tool
EACH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server() as server:
        yield server


def closed(**properties: Any) -> dict[str, Any]:
    kind = {"type": "object", "additionalProperties": False, "required": [*properties]}
    return {**kind, "properties": properties}


REFERRING = closed(city=CITY, next={"$ref": "#/properties/city"})


def asked_for(dialect: str, schema: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that ask for an answer of a schema."""
    format_ = {"type": "json_schema", "schema": schema}
    quick: dict[str, Any] = {"model": "local", "enable_thinking": False}
    chat = {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": format_}}
    ollama = {"model": "local", "format": schema, "think": False, "options": {"num_predict": 90}}
    return {
        "chat": ("/v1/chat/completions", {**quick, **chat, "max_tokens": 90}),
        "messages": (
            "/v1/messages",
            {**quick, "messages": ASKED, "max_tokens": 90, "output_config": {"format": format_}},
        ),
        "responses": (
            "/v1/responses",
            {**quick, "input": "Hi", "text": {"format": {**format_, "name": "r"}}},
        ),
        "ollama chat": ("/api/chat", {**ollama, "messages": ASKED}),
        "ollama generate": ("/api/generate", {**ollama, "prompt": "Hi"}),
    }[dialect]


def forced(dialect: str, schema: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that ask for a call of `f`."""
    path, body = asked_for(dialect, {})
    for key in ("response_format", "output_config", "text"):
        body.pop(key, None)
    tool: dict[str, Any] = {"name": "f", "parameters": schema}
    choice: Any = "required"
    if dialect == "messages":
        tool, choice = {"name": "f", "input_schema": schema}, {"type": "any"}
    rows = [{"type": "function", "function": tool}] if dialect == "chat" else [tool]
    if dialect == "responses":
        rows = [{"type": "function", **tool}]
    return path, {**body, "tools": rows, "tool_choice": choice}


def reply(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return the status, and the text or the arguments that came, put together."""
    answer = httpx.post(server.url + path, json=body, timeout=WAIT_S_MAX)
    if answer.status_code != 200:
        return answer.status_code, answer.text
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines())
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return 200, "".join(part for row in rows for part in said(row))


def said(row: Any) -> Iterator[str]:
    """Yield what a body or an event gives of the answer's text, or of its call's arguments."""
    if row.get("type") in ("response.output_text.delta", "response.function_call_arguments.delta"):
        yield row["delta"]
    for choice in row.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or {}
        yield message.get("content") or ""
        yield from (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    for part in row.get("content", ()) if row.get("type") == "message" else ():
        yield part["text"] if part["type"] == "text" else json.dumps(part["input"])
    if row.get("type") == "content_block_delta":
        yield row["delta"].get("text") or row["delta"].get("partial_json") or ""
    for item in row.get("output", ()) if row.get("object") == "response" else ():
        yield item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
    yield (row.get("message") or {}).get("content") or "" if "done" in row else ""
    yield row.get("response") or "" if "done" in row else ""


@EACH
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_obeys_a_reference_to_a_property(
    running: Server, dialect: str, stream: bool
) -> None:
    path, body = asked_for(dialect, REFERRING)
    status, text = reply(running, path, {**body, "stream": stream})
    assert status == 200, text
    found = json.loads(text)
    assert {*found} == {"city", "next"} and {*found.values()} <= {*CITY["enum"]}


@EACH
@pytest.mark.parametrize("dialect", CALLING)
def test_a_forced_call_obeys_all_but_the_keyword_that_no_grammar_holds(
    running: Server, dialect: str, stream: bool
) -> None:
    bad = {"anyOf": [NEVER | {"maxLength": 3}, CITY]}
    path, body = forced(dialect, closed(bad=bad, next={"$ref": "#/properties/bad/anyOf/1"}))
    status, text = reply(running, path, {**body, "stream": stream})
    assert status == 200, text
    found = json.loads(text)
    assert len(found["bad"]) <= len("Oslo") and found["next"] in CITY["enum"]


@EACH
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answers_schema_that_no_grammar_holds_is_a_400_with_keyword_and_place(
    running: Server, dialect: str, stream: bool
) -> None:
    path, body = asked_for(dialect, closed(city=CITY, bad={"anyOf": [CITY, NEVER]}))
    status, text = reply(running, path, {**body, "stream": stream})
    assert status == 400
    assert "at /properties/bad/anyOf/1: regex" in text and "look-around" in text


# ---------------------------------------------------------------- processes


def test_an_answer_starts_no_process_and_emptying_the_cache_cuts_none_under_way(
    running: Server,
) -> None:
    assert running.process is not None
    before = {each.pid for each in psutil.Process(running.process.pid).children(recursive=True)}
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 400, "maxItems": 400}
    path, body = asked_for("chat", closed(flags=flags))
    begun, texts = threading.Event(), list[str]()

    def read() -> None:
        asked = {**body, "stream": True, "max_tokens": 4_000}
        with httpx.stream("POST", running.url + path, json=asked, timeout=WAIT_S_MAX) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts.extend(said(json.loads(line.removeprefix("data: "))))
                if len("".join(texts)) > 40:
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(WAIT_S_MAX)
    running.forget()
    assert reader.is_alive(), "the answer is under way"
    during = {each.pid for each in psutil.Process(running.process.pid).children(recursive=True)}
    assert during == before
    reader.join(WAIT_S_MAX)
    assert len(json.loads("".join(texts))["flags"]) == 400
    assert reply(running, path, {**body, "max_tokens": 4_000})[0] == 200


LINKS = {f"d{n}": closed(a={"$ref": f"#/$defs/d{n + 1}"}) for n in range(5_000)}
ENDING = {
    "a chain of references": {"$ref": "#/$defs/d0", "$defs": {**LINKS, "d5000": CITY}},
    "a large multiple": closed(a={"type": "integer", "multipleOf": 999_983}),
    "a multiple of multiples": closed(
        a={"type": "integer", "multipleOf": 997, "allOf": [{"multipleOf": 991}]}
    ),
    "30,000 that may be left out": {
        **closed(),
        "properties": {f"p{n}": {} for n in range(30_000)},
        "required": [],
    },
}


def test_schemas_that_end_their_trial_are_400s_and_end_no_stream(running: Server) -> None:
    """Compiled in the worker they take its stack, its memory or many seconds."""
    assert running.process is not None
    before = {each.pid for each in psutil.Process(running.process.pid).children(recursive=True)}
    path, body = asked_for("chat", closed(flags={"type": "array", "items": CITY, "minItems": 300}))
    answered = list[tuple[int, str]]()
    other = threading.Thread(
        target=lambda: answered.append(
            reply(running, path, {**body, "max_tokens": 1_500, "stream": True})
        )
    )
    other.start()
    for attack, schema in ENDING.items():
        status, text = reply(running, *asked_for("chat", schema))
        assert status == 400 and ("CPU time" in text or "nested too deeply" in text), (attack, text)
    other.join(WAIT_S_MAX)
    assert answered and answered[0][0] == 200 and answered[0][1].startswith('{"flags":')
    after = {each.pid for each in psutil.Process(running.process.pid).children(recursive=True)}
    assert after == before, "the worker is the same, and nothing is left beside it"
