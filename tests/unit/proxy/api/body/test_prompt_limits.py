"""Bodies that are small for HTTP and endless for a template: each is refused before it is rendered.

The limits are patched to small ones, so that a body beyond each is cheap.
"""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hearth.proxy.api.body import prompt_limits
from hearth.proxy.app import ProxyApp
from hearth.proxy.http import http_exchange
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.errors import RequestError
from tests.helpers.proxy.proxy_app import app_of, ask

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}}


@pytest.fixture(autouse=True)
def _small_limits() -> Iterator[None]:
    with mock.patch.multiple(
        prompt_limits,
        MESSAGES_MAX=4,
        PARTS_MAX=8,
        TOOLS_MAX=3,
        TOOL_VALUES_MAX=40,
        OPTION_VALUES_MAX=5,
        CALL_VALUES_MAX=12,
    ):
        yield


@pytest.fixture
def edge(tmp_path: Path) -> ProxyApp:
    return app_of(tmp_path)


def chat_tool(name: str, schema: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema or {}}}


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


def item(arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


PART = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": ["x"] * 12}}
DEFINED = {"type": "tool_definition", "definition": {"name": "f", "input_schema": SCHEMA}}
MANY: list[tuple[Dialect, dict[str, Any], str]] = [
    ("chat", {"messages": [USER] * 5}, "is a list of 5 and this server accepts 4 messages"),
    ("messages", {"messages": [USER] * 5}, "messages is a list of 5"),
    ("messages", {"messages": [{"role": "user", "content": [RESULT] * 5}]}, "is a list of 5"),
    ("responses", {"input": [USER] * 5}, "input is a list of 5"),
    ("chat", {"messages": [{"role": "user", "content": [PART] * 3}] * 3}, "accepts 8 parts"),
    ("chat", {"messages": [USER], "tools": [chat_tool(n) for n in "abcd"]}, "accepts 3 tools"),
    ("chat", {"messages": [USER], "functions": [{"name": n} for n in "abcd"]}, "accepts 3 tools"),
    ("messages", {"messages": [USER], "tools": [{"name": n} for n in "abcd"]}, "accepts 3 tools"),
    ("responses", {"input": "x", "tools": [{"type": "function"}] * 4}, "accepts 3 tools"),
    (
        "chat",
        {"messages": [USER], "tools": [chat_tool(name, SCHEMA) for name in "abc"]},
        "tools have 57 JSON values and this server accepts 40. Remove at least 17.",
    ),
    (
        "messages",
        {"messages": [USER], "tools": [{"name": n, "input_schema": SCHEMA} for n in "abc"]},
        "tools have 51 JSON values",
    ),
    (
        "responses",
        {
            "input": "x",
            "tools": [{"type": "function", "name": n, "parameters": SCHEMA} for n in "abc"],
        },
        "tools have 54 JSON values",
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "system", "content": [{"type": "tool_addition", "tool": {**DEFINED}}]}
            ],
            "tools": [{"name": n, "input_schema": SCHEMA} for n in "ab"],
        },
        "tools have",
    ),
    (
        "chat",
        {"messages": [USER], "chat_template_kwargs": dict.fromkeys("abcdef", 1)},
        "chat_template_kwargs has 6 JSON values and this server accepts 5. Remove at least 1.",
    ),
    ("responses", {"input": "x", "chat_template_kwargs": {"a": [0] * 5}}, "has 6 JSON values"),
    ("messages", {"messages": [USER], "chat_template_kwargs": {"a": [[]] * 5}}, "has 6 JSON"),
    (
        "chat",
        {"messages": [called(json.dumps({"a": [{}] * 6})), called('{"b": [1, 2, 3, 4]}')]},
        "The arguments of all tool calls have 14 JSON values and this server accepts 12.",
    ),
    ("chat", {"messages": [called({"a": [1] * 12})]}, "arguments of all tool calls have"),
    ("responses", {"input": [item('{"a": [1, 2, 3, 4, 5, 6]}')] * 2}, "all tool calls have 16"),
    ("messages", {"messages": [{"role": "assistant", "content": [USE]}]}, "all tool calls have"),
    (
        "chat",
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"enum": ["x"] * 50}},
            },
        },
        "schema of the answer has 51 JSON values and this server accepts 40",
    ),
]


@pytest.mark.parametrize(("dialect", "body", "words"), MANY)
def test_a_body_of_endless_parts_is_refused_before_it_is_rendered(
    edge: ProxyApp, dialect: Dialect, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        edge.local.body_parser.parse(dialect, body, {})
    assert caught.value.status == 400


def test_a_body_at_each_limit_passes(edge: ProxyApp) -> None:
    body = {
        "messages": [called('{"a": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'), USER, USER, USER],
        "tools": [chat_tool("a", SCHEMA), chat_tool("b"), chat_tool("c")],
        "chat_template_kwargs": dict.fromkeys("abcde", 1),
    }
    request = edge.local.body_parser.parse("chat", body, {})
    assert (len(request.prompt.messages), len(request.prompt.tools)) == (4, 3)


def test_commas_in_the_texts_of_arguments_are_no_values(edge: ProxyApp) -> None:
    code = json.dumps({"code": 'f(a, b, [c, d], {e, f}), \\"' * 9})
    request = edge.local.body_parser.parse("chat", {"messages": [called(code)]}, {})
    assert request.prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == json.loads(code)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/v1/cache/prefill"]
)
def test_every_endpoint_that_takes_a_prompt_holds_to_the_limits(edge: ProxyApp, path: str) -> None:
    body = json.dumps({"model": "smollm2", "max_tokens": 1, "messages": [USER] * 5}).encode()
    reply = ask(edge, "POST", path, body=body)
    assert reply.status == 400 and b"Remove at least 1." in reply.content, reply.content


@pytest.mark.parametrize("size_max", [10_000, 10])
async def test_a_large_body_is_taken_apart_off_the_event_loop(
    edge: ProxyApp, size_max: int
) -> None:
    """While one is, the event loop answers others."""
    threads: list[str] = []
    names = edge.local.body_parser._digester.names

    def noted(messages: list[Any], owner: str) -> Any:
        threads.append(threading.current_thread().name)
        return names(messages, owner)

    body = {"messages": [USER]}
    request = edge.local.body_parser.parse("chat", body, {})
    with (
        mock.patch.object(http_exchange, "SMALL_BYTES_MAX", size_max),
        mock.patch.object(edge.local.body_parser._digester, "names", noted),
    ):
        await edge.local.body_parser.complete(request, size=len(json.dumps(body)))
    assert [name.startswith("bodies") for name in threads] == [size_max == 10]
