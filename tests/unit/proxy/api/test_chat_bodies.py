"""OpenAI chat bodies become our request, or a RequestError that names the field."""

from typing import Any

import pytest

from hearth.proxy.api import chat_completions, chat_completions_events
from hearth.proxy.api.body import sampling_params
from hearth.proxy.request.content_pieces import join, text_of
from hearth.shared.errors import RequestError
from hearth.shared.thinking import ThinkingWish
from hearth.shared.wire_messages import Constraints, TokenLogprob

USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def messages(*rows: Any) -> list[Any]:
    return chat_completions.parse(body(messages=list(rows))).prompt.messages


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat_completions.parse(body(**fields))
    assert caught.value.status == 400
    return caught.value


def test_a_plain_body_leaves_everything_to_the_workers_settings() -> None:
    request = chat_completions.parse(body())
    assert request.prompt.messages == [USER]
    assert request.sampling.temperature is None
    assert request.sampling.max_tokens is None
    assert not request.stream


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", "1"),
        ("seed", 2**64),
        *(("max_tokens", each) for each in (0, -3, 2**63, True)),
        ("n_predict", 0),
        ("repeat_penalty", 0),
        ("max_completion_tokens", 0),
        ("n", 9),
        ("n", 0),
        ("stop", ["a"] * 17),
        ("stop", ["x" * 257]),
        ("stop", [1]),
        ("stop", {}),
        ("stream", "true"),
        ("logprobs", 1),
        ("logit_bias", []),
        ("messages", {}),
        ("messages", None),
        ("tools", {}),
        ("chat_template_kwargs", []),
        ("enable_thinking", 1),
        ("stream_options", []),
        ("speculate", "no"),
        ("speculate", 1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert name in str(error)
    assert "allowed is" in str(error)


def test_logprobs_need_a_count_in_range_and_to_be_switched_on() -> None:
    assert chat_completions.parse(body(logprobs=True)).sampling.top_logprobs == 0
    assert chat_completions.parse(body(logprobs=True, top_logprobs=20)).sampling.top_logprobs == 20
    assert chat_completions.parse(body()).sampling.top_logprobs is None
    assert refused(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(top_logprobs=2).param == "top_logprobs"


@pytest.mark.parametrize("bias", [{"a": 1}, {"1": 101}, {"-1": 0}, {"1": None}, {"٣": 1}])
def test_a_logit_bias_is_token_ids_to_bounded_numbers(bias: Any) -> None:
    assert "logit_bias" in str(refused(logit_bias=bias))


def test_sampling_fields_arrive() -> None:
    sampling = chat_completions.parse(
        body(
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=1,
            frequency_penalty=-1,
            seed=-2,
            max_tokens=5,
            max_completion_tokens=7,
            stop="x",
            logit_bias={"007": 3},
        )
    ).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.seed, sampling.max_tokens, sampling.stop) == (2**64 - 2, 7, ["x"])
    assert sampling.logit_bias == {"7": 3.0}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_what_other_local_servers_call_no_limit_is_none(name: str) -> None:
    for value in (-1, -1.0, -2, None):
        sampling = chat_completions.parse(body(**{name: value})).sampling
        assert sampling.max_tokens is None
    most = chat_completions.parse(body(**{name: 2**53})).sampling.max_tokens
    assert most == sampling_params.TOKENS_MAX
    both = {"max_completion_tokens": -1, "max_tokens": 5, "n_predict": 9}
    assert chat_completions.parse(body(**both)).sampling.max_tokens == 5


def test_what_other_local_servers_take_for_nothing_is_nothing() -> None:
    sampling = chat_completions.parse(body(seed=-1, stop="", top_k=-1)).sampling
    assert (sampling.seed, sampling.stop, sampling.top_k) == (None, [], 0)
    assert chat_completions.parse(body(stop=["", "x", ""])).sampling.stop == ["x"]


def test_a_repetition_penalty_has_two_names_and_mlx_lms_goes_first() -> None:
    assert chat_completions.parse(body(repeat_penalty=1.2)).sampling.repetition_penalty == 1.2
    both = body(repeat_penalty=1.2, repetition_penalty=1.1)
    assert chat_completions.parse(both).sampling.repetition_penalty == 1.1


@pytest.mark.parametrize(
    "shape",
    [
        {"type": "json_object", "schema": {"type": "integer"}},
        {"type": "json_schema", "schema": {"type": "integer"}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
    ],
)
def test_a_schema_holds_wherever_llama_cpp_reads_it(shape: dict[str, Any]) -> None:
    constraints = chat_completions.parse(body(response_format=shape)).constraints
    assert (constraints.is_json, constraints.schema) == (True, {"type": "integer"})


def test_top_p_zero_means_the_likeliest_token_alone() -> None:
    sampling = chat_completions.parse(body(top_p=0)).sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 1)


def test_roles_are_checked_by_index() -> None:
    error = refused(messages=[USER, {"role": "robot", "content": "x"}])
    assert error.param == "messages[1].role"
    assert "robot" in str(error)


def test_developer_is_system_and_function_is_tool() -> None:
    rows = messages(
        {"role": "developer", "content": "d"}, {"role": "function", "name": "f", "content": "r"}
    )
    assert rows[0] == {"role": "system", "content": "d"}
    assert rows[1] == {"role": "tool", "content": "r", "name": "f"}


def test_a_system_message_in_the_middle_stays_there() -> None:
    rows = messages(USER, {"role": "system", "content": "now"}, USER)
    assert [row["role"] for row in rows] == ["user", "system", "user"]


def test_tool_calls_and_results_are_carried_with_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    rows = messages(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
    )
    assert rows[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1]}}
    assert rows[1]["reasoning_content"] == "hm"
    assert rows[1]["content"] == ""
    assert rows[2] == {"role": "tool", "content": "r", "tool_call_id": "c1"}


@pytest.mark.parametrize("text", ["{not json", "[1]", '{"a": 1' + "0" * 30 + "}", "[" * 500])
def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote(text: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}
    rows = messages(USER, {"role": "assistant", "tool_calls": [call]})
    assert rows[1]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "system", "content": {}}, "messages[0].content"),
        ({"role": "tool", "content": 5}, "messages[0].content"),
        ({"role": "tool", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "tool", "tool_call_id": 5}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": [5]}, "messages[0].content[0]"),
        ("x", "messages[0]"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ],
)
def test_a_message_without_what_it_needs_is_refused(message: Any, param: str) -> None:
    assert refused(messages=[message]).param == param


@pytest.mark.parametrize("kind", ["input_audio", "video_url"])
def test_what_is_neither_text_nor_image_is_refused_with_a_reason(kind: str) -> None:
    error = refused(messages=[{"role": "user", "content": [{"type": kind}]}])
    assert (error.code, error.param) == ("unsupported_content", "messages[0].content[0]")
    assert "text is read here and, by models that take them, images" in str(error)


@pytest.mark.parametrize("role", ["tool", "function"])
def test_what_a_result_shows_is_replaced_by_words(role: str) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {"data": "AA"}},
        {"type": "file", "file": {"file_id": "f"}},
    ]
    request = chat_completions.parse(
        body(messages=[USER, {"role": role, "name": "f", "content": parts}])
    )
    assert text_of(request.prompt.messages[1]["content"]).splitlines() == [
        "a",
        "[audio omitted: no model here reads it]",
        "[file omitted: no model here reads it]",
    ]
    assert request.left_out == ("input_audio", "file")


def test_of_an_assistants_parts_the_text_and_the_thoughts_stay() -> None:
    parts = [
        {"type": "thinking", "thinking": "why", "signature": "s"},
        {"type": "reasoning", "reasoning": [{"type": "text", "text": "then"}]},
        {"type": "redacted_thinking", "data": "x"},
        {"text": "a"},
        {"type": "refusal", "refusal": "no"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "unheard_of", "content": "b"},
    ]
    request = chat_completions.parse(body(messages=[USER, {"role": "assistant", "content": parts}]))
    (turn,) = request.prompt.messages[1:]
    assert (turn["content"], turn["reasoning_content"]) == (join(["a", "no", "b"]), "why\nthen")
    assert request.left_out == ("redacted_thinking", "image_url", "unheard_of")
    own = {"role": "assistant", "content": parts[:1], "reasoning_content": "own"}
    assert messages(USER, own)[1]["reasoning_content"] == "own"


def test_a_result_without_an_id_is_that_of_the_next_call() -> None:
    calls = [{"id": call_id, "function": {"name": "f"}} for call_id in ("c1", "c2", "c3")]
    turn = {"role": "assistant", "tool_calls": calls}
    result = {"role": "tool", "content": "r"}
    early = messages(result)
    assert early == [result]
    rows = messages(turn, result | {"tool_call_id": "c2"}, result, result, result)
    assert [row.get("tool_call_id") for row in rows[1:]] == ["c2", "c1", "c3", None]
    assert messages(turn, result | {"tool_call_id": ""})[1]["tool_call_id"] == "c1"


def test_tools_stay_as_they_were_sent_and_hosted_ones_are_counted() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    function = {"parameters": schema, "description": "d", "name": "f", "strict": True}
    tool = {"function": function, "type": "function"}
    tools = [tool | {"cache_control": {}}, {"type": "web_search"}]
    request = chat_completions.parse(body(tools=tools, functions=[function]))
    assert [list(each) for each in request.prompt.tools] == [list(tool), ["type", "function"]]
    sent, legacy = (each["function"] for each in request.prompt.tools)
    assert request.prompt.tools[0] == tool and list(sent) == list(function)
    assert list(legacy) == ["name", "description", "parameters"]
    assert list(legacy["parameters"]["properties"]) == ["b", "a"]
    assert request.left_out == ("web_search",)


def test_tools_that_are_loaded_later_stay_out_of_the_head() -> None:
    tools = [
        {"type": "function", "function": {"name": "now", "defer_loading": False}},
        {"type": "function", "function": {"name": "late"}, "defer_loading": True},
        {"type": "function", "function": {"name": "later", "defer_loading": True}},
    ]
    prompt = chat_completions.parse(body(tools=tools)).prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["now"]
    assert [tool["function"]["name"] for tool in prompt.deferred] == ["late", "later"]
    assert "defer_loading" not in prompt.deferred[1]["function"]
    named = {"type": "function", "function": {"name": "later"}}
    forced = chat_completions.parse(body(tools=tools, tool_choice=named)).constraints
    assert forced.tool_names == ["later"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        (
            {"type": "function", "function": {"name": "f", "parameters": "x"}},
            "tools[0].function.parameters",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": [1]}},
            "tools[0].function.parameters",
        ),
        ({}, "tools[0].type"),
        (7, "tools[0]"),
    ],
)
def test_a_broken_tool_is_refused_by_name(tool: Any, param: str) -> None:
    assert refused(tools=[tool]).param == param


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def constraints(**fields: Any) -> Constraints:
    return chat_completions.parse(body(**fields)).constraints


def test_a_plain_body_constrains_nothing() -> None:
    assert constraints() == Constraints()
    assert constraints(tools=TOOLS, tool_choice="auto") == Constraints()
    assert constraints(tools=[], tool_choice="auto", parallel_tool_calls=True) == Constraints()


def test_a_tool_choice_is_a_constraint_and_leaves_the_prompt_as_it_is() -> None:
    shown = chat_completions.parse(body(tools=TOOLS)).prompt
    named = {"type": "function", "function": {"name": "g"}}
    some = [{"type": "function", "function": {"name": "f"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": some}}
    for choice, wanted in (
        ("none", Constraints(tool_choice="none")),
        ("required", Constraints(tool_choice="required")),
        (named, Constraints(tool_choice="required", tool_names=["g"])),
        (allowed, Constraints(tool_choice="required", tool_names=["f"])),
    ):
        request = chat_completions.parse(body(tools=TOOLS, tool_choice=choice))
        assert request.constraints == wanted
        assert request.prompt == shown
    assert not constraints(tools=TOOLS, parallel_tool_calls=False).parallel_calls


def test_a_choice_that_no_call_can_satisfy_is_refused() -> None:
    missing = {"type": "function", "function": {"name": "h"}}
    hosted = [{"type": "web_search"}]
    for fields in (
        {"tools": TOOLS, "tool_choice": missing},
        {"tools": hosted, "tool_choice": missing},
        {"tools": [], "tool_choice": "required"},
        {"tools": hosted, "tool_choice": {"type": "web"}},
        {"tools": hosted, "tool_choice": {"type": ""}},
        {"tools": TOOLS, "tool_choice": ["auto"]},
        {"tools": TOOLS, "tool_choice": "sometimes"},
    ):
        error = refused(**fields)
        assert str(error.param).startswith("tool_choice"), fields
    assert "hosted" in str(refused(tools=hosted, tool_choice={"type": "file_search"}))


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "web_search_preview"},
        {"type": "web_search_preview_2025_03_11"},
        {"type": "function", "function": {"name": "web_search_preview"}},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search_preview"}]},
    ],
)
def test_a_choice_of_what_is_not_run_here_is_that_of_no_call(
    choice: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hosted = [{"type": "web_search_preview"}]
    with caplog.at_level("INFO"):
        assert constraints(tools=hosted, tool_choice=choice).tool_choice == "none"
    assert "tool_choice" in caplog.text


def test_functions_of_the_old_api_are_tools_of_which_one_may_be_called() -> None:
    functions = [{"name": "f", "parameters": {"type": "object"}}]
    request = chat_completions.parse(body(functions=functions))
    assert request.prompt.tools[0]["function"]["name"] == "f"
    assert request.constraints == Constraints(parallel_calls=False)
    named = constraints(functions=functions, function_call={"name": "f"})
    assert (named.tool_choice, named.tool_names) == ("required", ["f"])
    assert constraints(functions=functions, function_call="none").tool_choice == "none"
    assert refused(functions=functions, function_call="required").param == "function_call"
    assert refused(functions=functions, function_call={"name": "g"})


def test_a_format_is_a_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    inner = {"name": "answer", "schema": schema, "strict": True}
    wanted = constraints(response_format={"type": "json_schema", "json_schema": inner})
    assert wanted == Constraints(is_json=True, schema=schema)
    assert constraints(response_format={"type": "json_object"}) == Constraints(is_json=True)
    assert constraints(response_format={"type": "text"}) == Constraints()


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ("json", "response_format"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": [1]}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
            "response_format.json_schema.strict",
        ),
    ],
)
def test_a_format_that_is_none_is_refused_by_name(wanted: Any, param: str) -> None:
    assert refused(response_format=wanted).param == param


def test_several_choices_are_the_same_request_with_seeds_of_their_own() -> None:
    request = chat_completions.parse(body(n=3, seed=2**64 - 1))
    rows = request.submissions()
    assert [row.sampling.seed for row in rows] == [2**64 - 1, 0, 1]
    assert all(row.prompt == request.prompt for row in rows)
    assert [row.sampling.seed for row in chat_completions.parse(body(n=2)).submissions()] == [
        None,
        None,
    ]


def test_what_agents_send_beyond_the_api_is_accepted() -> None:
    request = chat_completions.parse(
        body(
            store=False,
            prompt_cache_key="k",
            context_management={"edits": []},
            stream_options=None,
            metadata={"a": "b"},
            tools=[],
            n=None,
            response_format=None,
            logit_bias=None,
            verbosity="low",
            unheard_of={"x": [1]},
        )
    )
    assert request.prompt.tools == []
    assert request.choices == 1


def test_a_turn_of_nothing_is_an_empty_one() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": ""}}
    rows = messages(
        USER,
        USER,
        {"role": "assistant", "content": None},
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [call], "function_call": None},
        {"role": "tool", "tool_call_id": "c1", "content": None},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": None},
        {"role": "system"},
    )
    assert [row["content"] for row in rows] == ["hi", "hi", "", "", "", "", "d", "", ""]
    assert rows[3]["reasoning_content"] == "hm"


def test_thinking_reaches_the_template_and_its_budget_the_worker() -> None:
    request = chat_completions.parse(body(enable_thinking=False, chat_template_kwargs={"x": 1}))
    assert request.prompt.template_kwargs == {"x": 1}
    assert request.prompt.thinking == ThinkingWish(False)
    request = chat_completions.parse(body(reasoning_effort="high", thinking_budget=99))
    assert request.prompt.thinking == ThinkingWish(True, "high", 99)
    assert request.constraints == Constraints(thinking_budget=99)
    assert refused(reasoning_effort="hard").param == "reasoning_effort"


def test_logprobs_carry_the_bytes_and_no_infinity() -> None:
    row = TokenLogprob(1, "�", b"\xe2", -0.5, [[2, "b", b"b", float("-inf")]])
    (told,) = chat_completions_events.logprob_fields([row])["content"]
    assert told["bytes"] == [0xE2]
    assert told["top_logprobs"][0]["logprob"] == -9999.0
