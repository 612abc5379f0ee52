"""Anthropic bodies become our request."""

from typing import Any

import pytest

from hearth.proxy.api.messages import messages_request
from hearth.proxy.request.content_pieces import join, text_of
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints


def body(*rows: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 10, "messages": list(rows), **fields}


def parsed(*rows: Any, **fields: Any) -> list[Any]:
    return messages_request.parse(body(*rows, **fields)).prompt.messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def refused(*rows: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        messages_request.parse(body(*rows, **fields))
    return caught.value


_SOURCE = "messages[0].content[0].source"
HI = {"role": "user", "content": "hi"}


def test_system_comes_first_and_a_later_system_message_stays_in_place() -> None:
    rows = parsed(HI, {"role": "system", "content": "b"}, HI, system=[text("a"), text("c")])
    assert [row["role"] for row in rows] == ["system", "user", "system", "user"]
    assert rows[0]["content"] == [text("a"), text("c")]


def test_an_answer_that_was_begun_in_parts_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": [text("a"), text("c")]}
    prompt = messages_request.parse(body(HI, begun)).prompt
    assert prompt.continues and prompt.messages[-1]["content"] == [text("a"), text("c")]


def test_telemetry_goes_from_the_start_of_the_system_prompt_and_from_nowhere_else() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.329.649; cc_entrypoint=sdk-cli;"
    for system in ([text(line), text("a")], [text(f"{line}\na")], f"{line}\na"):
        assert parsed(HI, system=system)[0] == {"role": "system", "content": "a"}
    assert [row["role"] for row in parsed(HI, system=[text(line)])] == ["user"]
    for system in ([text("a"), text(line)], [text(""), text(line)], [text(f"{line} x=1;")]):
        assert text_of(parsed(HI, system=system)[0]["content"]).splitlines()[-1].startswith(line)
    document = {"type": "document", "source": {"type": "text", "data": line}}
    assert parsed(HI, system=[document])[0]["content"] == line
    rows = parsed(user(text(line)), {"role": "system", "content": line})
    assert [row["content"] for row in rows] == [line, line]


def test_a_result_names_the_tools_that_it_loads() -> None:
    loads = [{"type": "tool_reference", "tool_name": name} for name in ("CronList", "WebFetch")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": loads}
    assert parsed(user(result))[0] == {
        "role": "tool",
        "tool_call_id": "t",
        "content": "",
        "tool_references": ["CronList", "WebFetch"],
    }
    mixed = result | {"content": [text("a"), *loads[:1], text("b")], "is_error": True}
    row = parsed(user(mixed))[0]
    assert (row["content"], row["tool_references"]) == (join(["Error: a", "b"]), ["CronList"])
    assert "tool_references" not in parsed(user(result | {"content": [text("a")]}))[0]
    bad = refused(user(result | {"content": [{"type": "tool_reference"}]}))
    assert bad.param == "messages[0].content[0].content[0].tool_name"
    assert parsed(user(text("a"), *loads)) == [{"role": "user", "content": "a"}]


def test_tools_that_are_loaded_later_stay_out_of_the_head() -> None:
    tools = [
        {"name": name, "input_schema": {"type": "object"}, "defer_loading": is_late}
        for name, is_late in (("Agent", None), ("CronList", True), ("Edit", False))
    ]
    prompt = messages_request.parse(body(HI, tools=tools)).prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["Agent", "Edit"]
    (late,) = prompt.deferred
    parameters = {"type": "object"}
    assert late == {
        "type": "function",
        "function": {"name": "CronList", "parameters": parameters},
    }
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    hosted = messages_request.parse(
        body(HI, tools=[search, *tools])
    ).prompt  # nobody here can search
    assert [tool["function"]["name"] for tool in hosted.tools] == ["Agent", "Edit", "CronList"]
    assert hosted.deferred == []
    assert refused(HI, tools=[tools[0] | {"defer_loading": "yes"}]).param == "defer_loading"


def test_tool_results_and_texts_keep_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("r")]}
    rows = parsed(HI, user(text("before"), result, text("after")))
    assert [row["role"] for row in rows] == ["user", "user", "tool", "user"]
    assert rows[2] == {"role": "tool", "tool_call_id": "t1", "content": "r"}


def test_a_tool_error_is_told_to_the_model() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "boom", "is_error": True}
    assert parsed(user(result))[0]["content"] == "Error: boom"


def test_an_assistant_turn_keeps_thinking_text_and_calls() -> None:
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "", "signature": ""},
            text("ok"),
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    }
    assert parsed(HI, turn)[1] == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "hm\n",
        "signatures": ["s", "x"],
        "tool_calls": [
            {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    }


def test_tools_take_their_schema_and_hosted_ones_are_counted() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {}}
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    request = messages_request.parse(body(HI, tools=[tool, hosted]))
    assert request.prompt.tools[0]["function"] == {"name": "f", "parameters": {"type": "object"}}
    assert request.left_out == ("web_search_20250305",)
    bad = refused(HI, tools=[{"name": "f", "input_schema": "x"}])
    assert bad.param == "tools[0].input_schema"


@pytest.mark.parametrize(
    ("rows", "fields", "param"),
    [
        ([], {}, "messages"),
        ([{"role": "tool", "content": "x"}], {}, "messages[0].role"),
        ([user({"type": "image", "source": {}})], {}, "messages[0].content[0].source.type"),
        ([user({"type": "image"})], {}, "messages[0].content[0].source"),
        ([user({"type": "audio", "source": {}})], {}, "messages[0].content[0]"),
        ([user({"text": "what"})], {}, "messages[0].content[0].type"),
        ([user(5)], {}, "messages[0].content[0]"),
        ([HI], {"max_tokens": -3}, "max_tokens"),
        ([HI], {"stop_sequences": [5]}, "stop_sequences"),
        ([HI], {"thinking": {"type": "maybe"}}, "thinking.type"),
        ([HI], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([HI], {"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ([HI], {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ([HI], {"system": 5}, "system"),
        ([HI], {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ([HI], {"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ([user({"type": "document", "source": {"type": "x"}})], {}, _SOURCE + ".type"),
        ([user({"type": "document", "source": {"type": "url"}})], {}, _SOURCE),
        ([user({"type": "document", "source": {"type": "file"}})], {}, _SOURCE),
        ([user({"type": "document", "source": {"type": "base64"}})], {}, _SOURCE + ".data"),
    ],
)
def test_what_is_wrong_is_named(rows: list[Any], fields: Any, param: str) -> None:
    error = refused(*rows, **fields)
    assert (error.status, error.param) == (400, param)


def constraints(*tools: Any, **fields: Any) -> Constraints:
    return messages_request.parse(body(HI, tools=list(tools), **fields)).constraints


def test_a_choice_constrains_and_leaves_the_prompt_as_it_is() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    free = messages_request.parse(body(HI, tools=[tool]))
    assert free.constraints == Constraints()
    for choice, expected in (
        ({"type": "auto"}, Constraints()),
        ({"type": "none"}, Constraints("none")),
        ({"type": "any"}, Constraints("required")),
        ({"type": "tool", "name": "f"}, Constraints("required", ["f"])),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            Constraints("required", parallel_calls=False),
        ),
    ):
        request = messages_request.parse(body(HI, tools=[tool], tool_choice=choice))
        assert request.constraints == expected
        assert request.prompt == free.prompt


def test_a_choice_of_what_is_not_run_here_is_that_of_no_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}  # as Claude Code's WebSearch
    own = {"name": "f", "input_schema": {"type": "object"}}
    named = {"type": "tool", "name": "web_search"}
    with caplog.at_level("INFO"):
        assert constraints(search, tool_choice=named) == Constraints("none")
    assert "tool_choice web_search" in caplog.text
    assert constraints(search, own, tool_choice=named) == Constraints("none")
    other = search | {"name": "look"}  # unlike its type
    assert constraints(other, tool_choice=named | {"name": "look"}) == Constraints("none")
    assert constraints(search, tool_choice={"type": "any"}) == Constraints("none")
    assert constraints(search, own, tool_choice={"type": "any"}) == Constraints("required")
    missing = refused(HI, tools=[search], tool_choice=named | {"name": "g"})
    assert (missing.status, missing.param) == (400, "tool_choice.name")
    client = own | {"name": "web_search"}  # the client's own tool of that name is called
    assert constraints(search, client, tool_choice=named).tool_names == ["web_search"]


def test_a_schema_and_a_budget_are_constraints_and_not_part_of_the_prompt() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    expected = Constraints(is_json=True, schema={"type": "object"})
    assert constraints(output_format=shape) == expected
    assert constraints(output_config={"format": shape}) == expected
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert constraints(thinking=thinking).thinking_budget == 2048
    asked = messages_request.parse(body(HI, output_format=shape)).prompt
    assert asked == messages_request.parse(body(HI)).prompt


def test_tools_that_the_client_runs_get_the_arguments_that_it_reads() -> None:
    kinds = ("bash_20250124", "text_editor_20250728", "memory_20250818", "computer_20251124")
    tools = [{"type": kind, "name": kind.split("_2")[0]} for kind in kinds]
    request = messages_request.parse(body(HI, tools=tools))
    functions = [tool["function"] for tool in request.prompt.tools]
    assert [row["name"] for row in functions] == ["bash", "text_editor", "memory"]
    assert functions[0]["parameters"]["properties"].keys() == {"command", "restart"}
    assert functions[1]["parameters"]["required"] == ["command", "path"]
    assert "rename" in functions[2]["parameters"]["properties"]["command"]["enum"]
    assert request.left_out == ("computer_20251124",)


def test_what_no_model_reads_is_replaced_by_words_in_a_result_and_refused_of_a_user() -> None:
    audio = {"type": "audio", "source": {}}
    document = {"type": "document", "source": {"type": "file", "file_id": "f"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), audio, document]}
    request = messages_request.parse(body(user(result)))
    assert text_of(request.prompt.messages[0]["content"]) == (
        "a\n[audio omitted: no model here reads it]\n[document omitted: no model here reads it]"
    )
    assert request.left_out == ("audio", "document")
    assert refused(user(audio)).code == "unsupported_content"


FOREIGN = (
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}, ""),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [
                {"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "x"}
            ],
        },
        "T\nU",
    ),
    (
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "web_fetch_result",
                "url": "U",
                "content": {"type": "document", "source": {"type": "text", "data": "page"}},
            },
        },
        "U\npage",
    ),
    (
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "s",
            "content": {
                "type": "code_execution_result",
                "stdout": "1",
                "stderr": "",
                "content": [],
            },
        },
        "1",
    ),
    ({"type": "mcp_tool_use", "id": "s", "name": "n", "server_name": "m", "input": {}}, ""),
    ({"type": "mcp_tool_result", "tool_use_id": "s", "content": [text("found")]}, "found"),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "compaction", "content": "summary", "encrypted_content": "x"}, "summary"),
    ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
)


@pytest.mark.parametrize(("block", "words"), FOREIGN)
def test_of_what_servers_made_the_text_stays(block: dict[str, Any], words: str) -> None:
    turn = {"role": "assistant", "content": [text("a"), block, text("b")]}
    request = messages_request.parse(body(HI, turn, user(block, text("c"))))
    _, said, asked = request.prompt.messages
    assert said["content"] == join(["a", *([words] if words else []), "b"])
    assert asked["content"] == "\n".join([*([words] if words else []), "c"])
    assert request.left_out == (block["type"], block["type"])


def test_tools_may_come_and_go_in_mid_conversation() -> None:
    late = {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True}
    inline = {"name": "inline", "input_schema": {"type": "object"}}
    system = {
        "role": "system",
        "content": [
            text("now"),
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": inline}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "old"}},
            {"type": "tool_removal", "tool": {"type": "mcp_toolset_reference", "name": "m"}},
        ],
    }
    request = messages_request.parse(body(HI, system, HI, tools=[late]))
    assert request.prompt.messages[1] == {
        "role": "system",
        "content": "now\nThe tool old is not available from here on.",
        "tool_references": ["late", "inline"],
    }
    assert [tool["function"]["name"] for tool in request.prompt.deferred] == ["late", "inline"]
    settings = {"role": "system", "output_config": {"effort": "low"}}
    assert [row["role"] for row in parsed(HI, settings, HI)] == ["user", "user"]


def test_fields_of_betas_change_nothing() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    plain = messages_request.parse(body(user(text("hi"))))
    extras = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "container": None,
        "mcp_servers": [],
        "betas": ["what-2030-01-01"],
        "cache_control": {"type": "ephemeral"},
    }
    request = messages_request.parse(body(user(marked), **extras))
    assert (request.prompt, request.constraints) == (plain.prompt, plain.constraints)
    assert request.left_out == ()


def test_no_token_at_all_reads_the_prompt() -> None:
    made = messages_request.parse(body(HI, max_tokens=0))
    assert made.prefill_only and made.sampling.max_tokens is None
    assert not messages_request.parse(body(HI)).prefill_only
