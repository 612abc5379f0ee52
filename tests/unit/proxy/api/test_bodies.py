"""Bodies of every dialect become our request, or a 400 that names the field: tests/data/api."""

from typing import Any

import orjson
import pytest

from hearth.proxy.api.chat_completions.parse import (
    PREDICTION_CHARS_MAX as CHARS_MAX,
    PREDICTION_PARTS_MAX as PARTS_MAX,
)
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.ollama.parse import CHAT, GENERATE, asks_for_answer, asks_to_unload
from hearth.proxy.api.responses.tools import ToolOrigin, responses_tools_of
from hearth.shared.errors import RequestError
from tests.helpers.cases import cases
from tests.helpers.proxy.read_bodies import read, shown


def in_each_dialect(table: str) -> list[Any]:
    """Return the table's cases of every dialect, each behind the dialect's name."""
    return [
        pytest.param(dialect, *row.values, id=f"{dialect}: {row.id}")
        for dialect in DIALECTS
        for row in cases(f"api/{dialect}_bodies.yaml", table)
    ]


def refused(dialect: str, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(dialect, **body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("dialect", "case"), in_each_dialect("read"))
def test_a_body_becomes_our_request(dialect: str, case: dict[str, Any]) -> None:
    for body in case.get("bodies") or [case.get("body", {})]:
        told = shown(read(dialect, **body))
        assert {name: told[name] for name in case["reads"]} == case["reads"]


@pytest.mark.parametrize(("dialect", "case"), in_each_dialect("constraining"))
def test_a_constraint_leaves_the_prompt_as_it_is(dialect: str, case: dict[str, Any]) -> None:
    body = case.get("body", {})
    free, told = read(dialect, **body), read(dialect, **body, **case["fields"])
    assert shown(told)["constraints"] == case["constraints"]
    assert told.prompt == free.prompt


@pytest.mark.parametrize(("dialect", "case"), in_each_dialect("refused"))
def test_what_is_wrong_is_named(dialect: str, case: dict[str, Any]) -> None:
    error = refused(dialect, **case["body"])
    assert error.param == case["param"] and case.get("says", "") in str(error)
    assert error.code == case.get("code", error.code)


@pytest.mark.parametrize(
    ("dialect", "name", "values"),
    [
        (dialect, row.id, row.values[0])
        for dialect in DIALECTS
        for row in cases(f"api/{dialect}_bodies.yaml", "out of range")
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    dialect: str, name: str, values: list[Any]
) -> None:
    for value in values:
        error = refused(dialect, **{name: value})
        assert error.param == name and f"{name} is" in str(error) and "allowed is" in str(error)


def test_several_choices_are_the_same_request_with_seeds_of_their_own() -> None:
    request = read("chat", n=3, seed=2**64 - 1)
    rows = request.submissions()
    assert [row.sampling.seed for row in rows] == [2**64 - 1, 0, 1]
    assert all(row.prompt == request.prompt for row in rows)
    assert [row.sampling.seed for row in read("chat", n=2).submissions()] == [None, None]


def test_the_fields_of_tools_keep_the_order_in_which_they_were_sent() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    function = {"parameters": schema, "description": "d", "name": "f", "strict": True}
    tool = {"function": function, "type": "function"}
    (sent,) = read("chat", tools=[tool]).prompt.tools
    assert orjson.dumps(sent) == orjson.dumps(tool)


def test_tools_that_the_client_runs_get_the_arguments_that_it_reads() -> None:
    kinds = ("bash_20250124", "text_editor_20250728", "memory_20250818")
    tools = [{"type": kind, "name": kind.split("_2")[0]} for kind in kinds]
    functions = [tool["function"] for tool in read("messages", tools=tools).prompt.tools]
    assert [row["name"] for row in functions] == ["bash", "text_editor", "memory"]
    bash, editor, memory = (row["parameters"] for row in functions)
    assert bash["properties"].keys() == {"command", "restart"}
    assert editor["required"] == ["command", "path"]
    assert "rename" in memory["properties"]["command"]["enum"]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}}


def test_what_the_model_calls_is_what_the_client_declared() -> None:
    agents = {
        "type": "namespace",
        "name": "multi_agent_v1",
        "tools": [function("spawn_agent"), function("close_agent")],
    }
    patch = {"type": "custom", "name": "spawn_agent"}
    search = {"type": "tool_search", "execution": "client"}
    clash = function("multi_agent_v1__spawn_agent")
    box = responses_tools_of({"input": "hi", "tools": [clash, agents, patch, search]})
    shown_names = [row["function"]["name"] for row in box.shown]
    assert len(set(shown_names)) == len(shown_names) == 5
    assert [box.origin(name) for name in (*shown_names, "made_up")] == [
        ToolOrigin("function", "multi_agent_v1__spawn_agent"),
        ToolOrigin("function", "spawn_agent", "multi_agent_v1"),
        ToolOrigin("function", "close_agent", "multi_agent_v1"),
        ToolOrigin("custom", "spawn_agent"),
        ToolOrigin("tool_search", "tool_search"),
        ToolOrigin("function", "made_up"),
    ]


def test_the_grammar_of_a_custom_tool_is_told_within_bounds() -> None:
    shape = {"type": "grammar", "syntax": "lark", "definition": "start: X" + "y" * 9000}
    (row,) = read(
        "responses", tools=[{"type": "custom", "name": "p", "format": shape}]
    ).prompt.tools
    assert 8_000 < len(row["function"]["description"]) < 8_300


# ---------------------------------------------------------------- predictions


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def test_a_prediction_is_bounded_in_characters_and_parts_and_is_of_one_choice() -> None:
    longest = [{"type": "text", "text": "x" * CHARS_MAX}]
    assert read("chat", **predicted(longest)).prediction == "x" * CHARS_MAX
    more = refused("chat", **predicted([*longest, {"type": "text", "text": "y"}]))
    assert more.code == "prediction_too_long"
    assert "has 1,000,001 characters" in str(more) and "Remove at least 1." in str(more)
    parts = [{"type": "text", "text": "a"}] * (PARTS_MAX + 1)
    assert refused("chat", **predicted(parts)).param == "prediction.content"
    assert "n is 2; allowed is 1 together with prediction" in str(
        refused("chat", **predicted("a"), n=2)
    )


# ---------------------------------------------------------------- Ollama


def test_only_a_body_without_a_question_loads_the_model() -> None:
    for dialect, body, asks in (
        *((CHAT, body, False) for body in ({}, {"messages": []}, {"messages": None})),
        *((GENERATE, body, False) for body in ({}, {"prompt": ""})),
        (CHAT, {"messages": [{"role": "user"}]}, True),
        (GENERATE, {"images": ["iVBO"]}, True),
    ):
        assert asks_for_answer(dialect, body) is asks, (dialect, body)


def test_a_keep_alive_of_nothing_unloads_and_what_is_no_duration_is_refused() -> None:
    for value in (0, 0.0, "0", "0s", "0h0m"):
        assert asks_to_unload({"keep_alive": value}), value
    for value in (None, -1, "-1", 300, "5m", "1h30m", "0.5s", "-1m"):
        assert not asks_to_unload({"keep_alive": value}), value
    for value in ("soon", "", "5 minutes", True, [], "m"):
        with pytest.raises(RequestError) as caught:
            asks_to_unload({"keep_alive": value})
        assert caught.value.param == "keep_alive"
