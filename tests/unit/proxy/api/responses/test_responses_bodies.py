"""Responses bodies become our request."""

from typing import Any

import pytest

from hearth.proxy.api.responses import responses_request
from hearth.proxy.api.responses.responses_tools import ToolOrigin, responses_tools_of
from hearth.proxy.request.content_pieces import text_of
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints


def parsed(given: Any, **fields: Any) -> list[Any]:
    return responses_request.parse({"model": "m", "input": given, **fields}).prompt.messages


def refused(given: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(given, **fields)
    return caught.value


def message(role: str, words: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def test_a_string_is_a_user_message_behind_the_instructions() -> None:
    assert parsed("hi", instructions="be good") == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "hi"},
    ]


def test_one_turn_of_reasoning_text_and_calls_is_one_message() -> None:
    rows = parsed(
        [
            message("developer", "d"),
            message("user", "u"),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
            message("assistant", "a"),
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "patch"},
            {"type": "function_call_output", "call_id": "c1", "output": "r1"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "r2"}],
            },
        ]
    )
    assert [row["role"] for row in rows] == ["system", "user", "assistant", "tool", "tool"]
    turn = rows[2]
    assert (turn["content"], turn["reasoning_content"]) == ("a", "why")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [
        {"x": 1},
        {"input": "patch"},
    ]
    assert rows[4] == {"role": "tool", "tool_call_id": "c2", "content": "r2"}


def test_reasoning_before_a_call_belongs_to_the_call() -> None:
    rows = parsed(
        [
            {"role": "user", "content": "u"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        ]
    )
    assert rows[1]["reasoning_content"] == "t"
    assert rows[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_reasoning_between_a_text_and_a_call_keeps_its_place() -> None:
    rows = parsed(
        [
            message("assistant", "first"),
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "then"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
    )
    assert [row.get("reasoning_content") for row in rows] == [None, "then"]
    assert "tool_calls" in rows[1]


def encrypted(sealed: str, *summary: str) -> dict[str, Any]:
    rows = [{"type": "summary_text", "text": words} for words in summary]
    return {"type": "reasoning", "summary": rows, "content": None, "encrypted_content": sealed}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}


def test_encrypted_reasoning_names_the_turn_that_follows_it() -> None:
    rows = parsed(
        [
            *(
                message("user", "u"),
                encrypted("e1", "why"),
                message("assistant", "a"),
                CALL,
                RESULT,
            ),
            *(encrypted("e2"), CALL, RESULT),
            *(encrypted("e3"), encrypted(""), message("assistant", "b")),
        ]
    )
    turns = [row for row in rows if row["role"] == "assistant"]
    assert [row["signatures"] for row in turns] == [["e1"], ["e2"], ["e3"]]
    assert [row.get("reasoning_content") for row in turns] == ["why", None, None]
    assert ["tool_calls" in row for row in turns] == [True, True, False]


def test_encrypted_reasoning_within_a_turn_leaves_it_one() -> None:
    (turn,) = parsed([encrypted("e1"), message("assistant", "a"), encrypted("e2"), CALL])
    assert turn["signatures"] == ["e1", "e2"]
    assert (turn["content"], len(turn["tool_calls"])) == ("a", 1)


def test_encrypted_reasoning_that_nothing_follows_adds_no_turn() -> None:
    rows = parsed(
        [message("user", "u"), encrypted("e"), message("user", "v"), message("assistant", "a")]
    )
    assert [row["role"] for row in rows] == ["user", "user", "assistant"]
    assert "signatures" not in rows[2]
    cut = parsed([message("user", "u"), encrypted("e", "why")])
    assert cut[1]["signatures"] == ["e"]
    bad = {"type": "reasoning", "encrypted_content": 5}
    assert refused([bad]).param == "input[0].encrypted_content"


def test_a_conversation_object_is_refused_with_what_to_do() -> None:
    error = refused("hi", conversation="conv_1")
    assert error.param == "conversation"
    assert "previous_response_id" in str(error)


def test_a_response_in_background_is_refused_with_what_to_do() -> None:
    error = refused("hi", background=True)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "background")
    assert "send false" in str(error)
    assert parsed("hi", background=False)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([], "input"),
        ("", "input"),
        ([5], "input[0]"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input[0].content[0]"),
        ([{"type": "function_call_output", "call_id": "c", "output": 5}], "input[0].output"),
        ([{"type": "function_call_output", "output": "r"}], "input[0].call_id"),
        ([{"type": "tool_search_output", "call_id": "c", "tools": {}}], "input[0].tools"),
    ],
)
def test_what_is_wrong_is_named(given: Any, param: str) -> None:
    assert refused(given).param == param


def test_tools_are_flat_and_hosted_ones_are_counted() -> None:
    body = {
        "model": "m",
        "input": "hi",
        "tools": [
            {"type": "function", "name": "f", "parameters": {}, "strict": False},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "function", "name": "late", "defer_loading": True},
            {"type": "web_search"},
        ],
    }
    request = responses_request.parse(body)
    assert [tool["function"]["name"] for tool in request.prompt.tools] == ["f", "patch"]
    assert [tool["function"]["name"] for tool in request.prompt.deferred] == ["late"]
    assert request.left_out == ("web_search",)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}} | more


AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for sub-agents.",
    "tools": [tool("spawn_agent", description="Spawns."), tool("close_agent")],
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def names(tools: list[Any]) -> list[str]:
    return [row["function"]["name"] for row in tools]


def test_a_namespace_is_its_functions_under_names_of_their_own() -> None:
    request = responses_request.parse({"input": "hi", "tools": [tool("close_agent"), AGENTS]})
    assert names(request.prompt.tools) == [
        "close_agent",
        "multi_agent_v1__spawn_agent",
        "multi_agent_v1__close_agent",
    ]
    spawn, close = (row["function"] for row in request.prompt.tools[1:])
    assert spawn["description"] == "Tools for sub-agents.\n\nSpawns."  # told once for all of them
    assert "description" not in close
    assert request.left_out == ()


def test_what_the_model_calls_is_what_the_client_declared() -> None:
    clash = tool("multi_agent_v1__spawn_agent")
    patch = {"type": "custom", "name": "spawn_agent"}
    box = responses_tools_of({"input": "hi", "tools": [clash, AGENTS, patch, SEARCH]})
    shown = names(box.shown)
    assert len(set(shown)) == len(shown) == 5
    assert [box.origin(name) for name in shown] == [
        ToolOrigin("function", "multi_agent_v1__spawn_agent"),
        ToolOrigin("function", "spawn_agent", "multi_agent_v1"),
        ToolOrigin("function", "close_agent", "multi_agent_v1"),
        ToolOrigin("custom", "spawn_agent"),
        ToolOrigin("tool_search", "tool_search"),
    ]
    assert box.origin("made_up") == ToolOrigin("function", "made_up")


def test_a_call_in_the_history_has_the_name_that_the_model_saw() -> None:
    calls = [
        CALL | {"name": "spawn_agent", "namespace": "multi_agent_v1"},
        CALL | {"name": "gone", "namespace": "old"},
        CALL,
    ]
    (turn,) = parsed(calls, tools=[AGENTS])
    assert [call["function"]["name"] for call in turn["tool_calls"]] == [
        "multi_agent_v1__spawn_agent",
        "old__gone",
        "f",
    ]


def test_a_custom_tool_tells_its_grammar_within_bounds() -> None:
    shape = {"type": "grammar", "syntax": "lark", "definition": "start: X" + "y" * 9000}
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": shape}
    (row,) = responses_request.parse({"input": "hi", "tools": [patch]}).prompt.tools
    told = row["function"]["description"]
    assert told.startswith("Edits.\n\nThe input has to match this lark grammar:\nstart: Xy")
    assert len(told) < 8_300
    assert row["function"]["parameters"]["required"] == ["input"]


def test_tools_that_a_search_found_are_shown_where_it_ended() -> None:
    found = {"type": "tool_search_output", "call_id": "s", "status": "completed"}
    given = [
        message("user", "u"),
        {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "agents"}},
        found | {"tools": [AGENTS, tool("late", defer_loading=True)]},
        CALL | {"name": "spawn_agent", "namespace": "multi_agent_v1"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        found | {"tools": [], "call_id": "s2"},
        {"type": "additional_tools", "role": "developer", "tools": [tool("more")]},
    ]
    prompt = responses_request.parse({"input": given, "tools": [tool("f"), SEARCH]}).prompt
    assert names(prompt.tools) == ["f", "tool_search"]
    loaded = ["multi_agent_v1__spawn_agent", "multi_agent_v1__close_agent", "late"]
    assert names(prompt.deferred) == [*loaded, "more"]
    _, search, result, call, _, nothing, added = prompt.messages
    assert search["tool_calls"][0]["function"] == {
        "name": "tool_search",
        "arguments": {"query": "agents"},
    }
    assert result == {
        "role": "tool",
        "tool_call_id": "s",
        "content": "",
        "tool_references": loaded,
    }
    assert call["tool_calls"][0]["function"]["name"] == loaded[0]
    assert nothing["content"] == "No tools were found."
    assert added == {"role": "system", "content": "", "tool_references": ["more"]}


def test_what_only_a_search_by_the_server_could_load_is_shown_at_once() -> None:
    tools = [tool("late", defer_loading=True), {"type": "tool_search"}]
    prompt = responses_request.parse({"input": "hi", "tools": tools}).prompt
    assert (names(prompt.tools), prompt.deferred) == (["late"], [])


HOSTED = [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}, {"type": "local_shell"}]


def constraints(**fields: Any) -> Constraints:
    tools = [tool("f"), {"type": "custom", "name": "patch"}, AGENTS, *HOSTED]
    return responses_request.parse({"input": "hi", "tools": tools, **fields}).constraints


def test_a_choice_constrains_and_leaves_the_prompt_as_it_is() -> None:
    spawn = "multi_agent_v1__spawn_agent"
    allowed = {"type": "allowed_tools", "mode": "auto"}
    for choice, expected in (
        ("auto", Constraints()),
        ("none", Constraints("none")),
        ("required", Constraints("required")),
        ({"type": "function", "name": "f"}, Constraints("required", ["f"])),
        ({"type": "custom", "name": "patch"}, Constraints("required", ["patch"])),
        ({"type": "function", "name": "spawn_agent"}, Constraints("required", [spawn])),
        (
            allowed | {"tools": [{"type": "function", "name": "f"}, HOSTED[1]]},
            Constraints("auto", ["f"]),
        ),
        (allowed | {"tools": [HOSTED[0]]}, Constraints("none")),
        (allowed | {"mode": "required", "tools": [HOSTED[0]]}, Constraints("none")),
        ({"type": "web_search"}, Constraints("none")),
        ({"type": "mcp", "server_label": "s"}, Constraints("none")),
    ):
        assert constraints(tool_choice=choice) == expected
    assert not constraints(parallel_tool_calls=False).parallel_calls
    body = {"input": "hi", "tools": [tool("f")]}
    free, forbidden = (
        responses_request.parse(body | {"tool_choice": kind}) for kind in ("auto", "none")
    )
    assert free.prompt == forbidden.prompt


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        ({"type": "file_search"}, "tool_choice"),
        ({"type": "function", "name": "g"}, "tool_choice.name"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "all", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice"),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]},
            "tool_choice.tools[0].name",
        ),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        constraints(tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert refused("hi", tool_choice="required", tools=[]).param == "tool_choice"


@pytest.mark.parametrize("given", [None, 5, {"role": "user"}])
def test_an_input_of_another_kind_is_told_both_that_are_allowed(given: Any) -> None:
    assert "allowed is a string or a list of items" in str(refused(given))


def test_a_call_that_only_hosted_tools_could_answer_is_not_required() -> None:
    request = responses_request.parse({"input": "hi", "tools": HOSTED, "tool_choice": "required"})
    assert request.constraints == Constraints("none")


def test_a_format_is_a_constraint() -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    shape = {"type": "json_schema", "name": "title", "strict": True, "schema": schema}
    assert constraints(text={"format": shape}) == Constraints(is_json=True, schema=schema)
    assert constraints(text={"format": {"type": "json_object"}}) == Constraints(is_json=True)
    assert constraints(text={"format": {"type": "text"}, "verbosity": "low"}) == Constraints()
    assert refused("hi", text={"format": {"type": "grammar"}}).param == "text.format.type"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}, None),
        ({"type": "compaction", "encrypted_content": "x"}, None),
        ({"type": "compaction_trigger"}, None),
        ({"type": "image_generation_call", "result": "iVBO"}, None),
        ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, None),
        ({"type": "tool_search_call", "execution": "server", "arguments": {}}, None),
        ({"type": "mcp_call", "name": "n", "arguments": "{}", "output": "o"}, ("assistant", "o")),
        (
            {
                "type": "code_interpreter_call",
                "code": "1",
                "outputs": [{"type": "logs", "logs": "l"}],
            },
            ("assistant", "l"),
        ),
        (
            {
                "type": "agent_message",
                "author": "/root",
                "content": [{"type": "input_text", "text": "t"}],
            },
            ("user", "t"),
        ),
    ],
)
def test_of_what_servers_made_the_text_stays(
    item: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    request = responses_request.parse({"input": [message("user", "u"), item, message("user", "v")]})
    between = [(row["role"], row["content"]) for row in request.prompt.messages[1:-1]]
    assert between == ([expected] if expected else [])
    assert request.left_out == (item["type"],)


def test_what_a_result_shows_is_replaced_by_words() -> None:
    output = [
        {"type": "input_text", "text": "a"},
        {"type": "input_audio", "data": "iVBO"},
        {"type": "input_file", "file_id": "f"},
        {"type": "encrypted_content", "encrypted_content": "x"},
    ]
    (row,) = parsed([RESULT | {"output": output}])
    assert text_of(row["content"]).splitlines() == [
        "a",
        "[audio omitted: no model here reads it]",
        "[file omitted: no model here reads it]",
        "[encrypted_content omitted: no model here reads it]",
    ]


def test_an_assistant_may_have_said_nothing() -> None:
    rows = parsed([message("user", "u"), {"role": "assistant", "content": None}, CALL])
    assert (rows[1]["content"], len(rows[1]["tool_calls"])) == ("", 1)
    assert parsed([{"role": "user", "content": None}]) == [{"role": "user", "content": ""}]


def test_a_result_may_be_nothing_or_an_object() -> None:
    outputs = (None, {"ok": True, "n": 1})
    rows = parsed([RESULT | {"output": output} for output in outputs])
    assert [row["content"] for row in rows] == ["", '{"ok":true,"n":1}']
    (found,) = parsed([{"type": "tool_search_output", "call_id": "c", "tools": None}])
    assert found["content"] == "No tools were found."
