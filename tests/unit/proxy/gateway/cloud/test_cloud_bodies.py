"""A cloud model's body holds what its provider acts upon, and nothing that LiteLLM does."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings, strategies as st

from hearth.proxy.gateway.cloud import cloud_fields
from hearth.proxy.gateway.cloud.cloud_bodies import CloudDialect, cloud_body
from hearth.shared.errors import RequestError

SINK = "https://sink.example/v1"
FORBIDDEN = {
    "api_base": SINK,
    "base_url": SINK,
    "api_key": "sk-theirs",
    "api_version": "x",
    "organization": "org",
    "custom_llm_provider": "openai",
    "extra_headers": {"x": "y"},
    "headers": {"x": "y"},
    "extra_query": {"x": "y"},
    "extra_body": {"api_base": SINK},
    "mock_response": "mocked",
    "mock_tool_calls": [],
    "mock_timeout": True,
    "mock_testing_fallbacks": True,
    "mock_testing_context_fallbacks": True,
    "fallbacks": [{"a": ["b"]}],
    "context_window_fallbacks": [],
    "content_policy_fallbacks": [],
    "context_window_fallback_dict": {},
    "disable_fallbacks": True,
    "model_list": [{"model_name": "m", "litellm_params": {"api_base": SINK}}],
    "user_config": {"model_list": []},
    "router_settings_override": {"fallbacks": []},
    "specific_deployment": True,
    "deployment_id": "d",
    "model_info": {"id": "d"},
    "model_id": "d",
    "timeout": 0.001,
    "request_timeout": 0.001,
    "stream_timeout": 0.001,
    "num_retries": 9,
    "max_retries": 9,
    "retry_policy": {},
    "priority": 1,
    "cache": {"no-store": True},
    "caching": True,
    "ttl": 1,
    "no-log": True,
    "tags": ["paid"],
    "guardrails": [],
    "guardrail_config": {},
    "policies": [],
    "prompt_id": "p",
    "prompt_variables": {},
    "prompt_label": "l",
    "vector_store_ids": ["vs"],
    "callbacks": ["x"],
    "success_callback": ["langfuse"],
    "failure_callback": ["langfuse"],
    "langfuse_public_key": "pk",
    "langfuse_secret_key": "sk",
    "langfuse_host": SINK,
    "langsmith_api_key": "x",
    "logger_fn": "x",
    "litellm_metadata": {"tags": ["x"], "user_api_key": "y"},
    "litellm_session_id": "s",
    "litellm_trace_id": "t",
    "litellm_params": {"api_base": SINK},
    "litellm_logging_obj": {},
    "proxy_server_request": {"headers": {}},
    "secret_fields": {"raw_headers": {}},
    "allowed_openai_params": ["x"],
    "drop_params": True,
    "additional_drop_params": ["tools"],
    "input_cost_per_token": 0.0,
    "mcp_servers": [{"type": "url", "url": SINK, "authorization_token": "t"}],
    "container": "container_1",
    "aws_access_key_id": "x",
    "aws_bedrock_runtime_endpoint": SINK,
    "vertex_project": "x",
    "vertex_credentials": "/etc/passwd",
    "azure_ad_token": "x",
    "use_kv_cache": False,
    "session_id": "s",
    "chat_template_kwargs": {"a": 1},
}
USER = {"role": "user", "content": "hi"}
SMALL: dict[CloudDialect, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "hi"},
    "messages": {"model": "m", "messages": [USER], "max_tokens": 9},
    "messages_count": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": "hi"},
    "responses_count": {"model": "m", "input": "hi"},
    "embeddings": {"model": "m", "input": ["hi"]},
}
DIALECTS = st.sampled_from(list(SMALL))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def refusal(dialect: CloudDialect, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        cloud_body(dialect, SMALL[dialect] | fields, "g")
    assert caught.value.status == 400
    return caught.value


def messages(*content: Any, role: str = "user", dialect: CloudDialect = "messages") -> Any:
    """Return the content that a provider is shown of a message."""
    body = cloud_body(dialect, {"messages": [{"role": role, "content": list(content)}]}, "g")
    return body["messages"][0]["content"]


def in_order(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def items(*given: Any) -> Any:
    return cloud_body("responses", {"input": list(given)}, "g")["input"]


# ---------------------------------------------------------------- the top


@pytest.mark.parametrize("dialect", SMALL)
def test_nothing_forbidden_passes_and_what_is_asked_stays(dialect: CloudDialect) -> None:
    body = SMALL[dialect] | FORBIDDEN
    before = orjson.dumps(body)
    assert cloud_body(dialect, body, "group") == SMALL[dialect] | {"model": "group"}
    assert orjson.dumps(body) == before


@given(
    dialect=DIALECTS,
    named=st.dictionaries(st.sampled_from(list(FORBIDDEN)) | st.text(max_size=9), JSON),
)
@settings(max_examples=300)
def test_unknown_names_never_pass(dialect: CloudDialect, named: dict[str, Any]) -> None:
    unknown = {name: value for name, value in named.items() if name not in _known(dialect)}
    sent = cloud_body(dialect, unknown | SMALL[dialect], "g")
    assert sent == SMALL[dialect] | {"model": "g"}


def _known(dialect: CloudDialect) -> frozenset[str]:
    """Return the names of fields that are allowed, or refused rather than passed over."""
    return cloud_fields.BODY[dialect] | {"thread", "conversation", "prompt", "background"}


@given(dialect=DIALECTS, data=st.data())
@settings(max_examples=300)
def test_allowed_fields_pass_as_they_are(dialect: CloudDialect, data: st.DataObject) -> None:
    nested = {"messages", "input", "tools", "functions", "tool_choice", "parallel_tool_calls"}
    judged = nested | {"system", "metadata", "user", "safety_identifier", "model", "prompt"}
    names = sorted(cloud_fields.BODY[dialect] - judged)
    fields = data.draw(st.dictionaries(st.sampled_from(names), JSON))
    body = SMALL[dialect] | fields
    assert in_order(cloud_body(dialect, body, "g")) == in_order(body | {"model": "g"})


@given(dialect=DIALECTS, name=st.sampled_from(["messages", "input", "tools", "system"]), odd=JSON)
@settings(max_examples=300)
def test_any_shape_is_a_body_or_a_refusal(dialect: CloudDialect, name: str, odd: Any) -> None:
    if name not in cloud_fields.BODY[dialect]:
        return
    try:
        sent = cloud_body(dialect, SMALL[dialect] | {name: odd}, "g")
    except RequestError as error:
        assert error.status == 400
    else:
        assert sent["model"] == "g"


def test_metadata_passes_as_the_users_id_of_messages_alone() -> None:
    metadata = {"user_id": "u", "tags": ["x"], "model_info": {"id": "d"}, "user_api_key": "k"}
    assert cloud_body("messages", SMALL["messages"] | {"metadata": metadata}, "g")["metadata"] == {
        "user_id": "u"
    }
    odd = cloud_body("messages", SMALL["messages"] | {"metadata": {"user_id": {"a": 1}}}, "g")
    assert odd["metadata"] == {}
    for dialect in ("chat", "responses", "embeddings", "completions"):
        assert "metadata" not in cloud_body(
            dialect, SMALL[dialect] | {"metadata": metadata, "user": {"a": 1}}, "g"
        )


def test_what_names_a_state_of_the_providers_is_refused() -> None:
    for name, value in (("conversation", "c"), ("prompt", {"id": "p"}), ("background", True)):
        error = refusal("responses", **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
    assert "background" not in cloud_body("responses", {"input": "x", "background": False}, "g")
    assert refusal("messages", thread={"id": "t"}).code == "thread_unsupported_request"


# ---------------------------------------------------------------- tools


def test_tools_that_litellm_would_run_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    mcp = {"type": "mcp", "server_url": "litellm_proxy/mcp/x", "server_label": "x"}
    search = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    function = {"type": "function", "name": "f", "parameters": {"api_base": SINK}, "api_base": SINK}
    body = SMALL["responses"] | {"tools": [mcp, search, {"type": "litellm_x"}, function]}
    with caplog.at_level("INFO"):
        sent = cloud_body("responses", body, "g")
    assert sent["tools"] == [
        {"type": "function", "name": "f", "parameters": {"api_base": SINK}}  # a schema is data
    ]
    assert "file_search, litellm_x, mcp" in caplog.text


def test_nested_tools_are_filtered_as_well() -> None:
    mcp = {"type": "mcp", "server_url": SINK}
    function = {"type": "function", "name": "f"}
    namespace = {"type": "namespace", "name": "n", "tools": [mcp, function], "api_key": "k"}
    sent = cloud_body("responses", SMALL["responses"] | {"tools": [namespace]}, "g")
    assert sent["tools"] == [{"type": "namespace", "name": "n", "tools": [function]}]
    loaded = {"type": "additional_tools", "role": "developer", "tools": [mcp, function]}
    assert items(loaded) == [loaded | {"tools": [function]}]


def test_hosted_tools_keep_no_other_model_file_or_container() -> None:
    tools = [
        {"type": "code_interpreter", "container": "cntr_1"},
        {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}},
        {"type": "image_generation", "model": "m", "input_image_mask": {"file_id": "f"}},
        {"type": "web_search_2025_08_26", "search_context_size": "low"},
    ]
    sent = cloud_body("responses", SMALL["responses"] | {"tools": tools}, "g")["tools"]
    auto = {"type": "code_interpreter", "container": {"type": "auto"}}
    assert sent == [auto, auto, {"type": "image_generation"}, tools[3]]


def test_anthropics_tools_pass_but_the_advisor_and_mcp() -> None:
    advisor = {
        "type": "advisor_20260301",
        "name": "advisor",
        "model": "gpt-4o",
        "api_base": SINK,
        "api_key": "k",
    }
    bash = {"type": "bash_20250124", "name": "bash"}
    own = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    tools = [advisor, {"type": "mcp_toolset", "mcp_server_name": "x"}, bash, own | {"api_key": "k"}]
    assert cloud_body("messages", SMALL["messages"] | {"tools": tools}, "g")["tools"] == [bash, own]
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": advisor}}
    text = {"type": "text", "text": "t"}
    assert messages(added, text, role="system") == [text]
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": own}}
    assert messages(added, role="system") == [added]


def test_a_choice_among_tools_goes_with_the_last_of_them() -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": True, "tools": [{"type": "mcp"}]}
    assert cloud_body("responses", SMALL["responses"] | fields, "g") == {
        "model": "g",
        "input": "hi",
    }
    tools = [{"type": "mcp"}, {"type": "function", "name": "f"}]
    chosen = {"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": tools}
    assert "tool_choice" not in cloud_body("responses", SMALL["responses"] | chosen, "g")
    chosen["tool_choice"] = {"type": "function", "name": "f"}
    assert "tool_choice" in cloud_body("responses", SMALL["responses"] | chosen, "g")
    assert "tools" not in cloud_body("chat", SMALL["chat"] | {"tools": None}, "g")


def test_chat_tools_and_calls_keep_their_own_fields() -> None:
    function = {"name": "f", "description": "d", "parameters": {}, "strict": True}
    tool = {"type": "function", "function": function | {"api_base": SINK}, "model": "m"}
    sent = cloud_body("chat", SMALL["chat"] | {"tools": [tool, {"type": "mcp"}]}, "g")
    assert sent["tools"] == [{"type": "function", "function": function}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    held = {"provider_specific_fields": {"thought_signature": "s", "api_key": "k"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call | held], "x": 1}
    sent = cloud_body("chat", {"messages": [turn]}, "g")
    kept = {"provider_specific_fields": {"thought_signature": "s"}}
    assert sent["messages"] == [{"role": "assistant", "content": None, "tool_calls": [call | kept]}]


# ---------------------------------------------------------------- what is shown


METADATA = "http://169.254.169.254/latest"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": METADATA}},
        {"type": "image_url", "image_url": METADATA},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "file", "file": {"file_id": METADATA}},
        {"type": "file", "file": {"file_data": METADATA}},
        {"type": "input_audio", "input_audio": {"data": METADATA, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": METADATA}},
        {"type": "document", "source": {"type": "url", "url": METADATA}},
        {"type": "guarded_text", "text": "x"},
        {"type": ["text"], "text": "x"},
    ],
)
def test_chat_shows_no_address_of_this_network_and_no_file_of_the_account(part: Any) -> None:
    error = refusal("chat", messages=[{"role": "user", "content": [part]}])
    assert (error.param or "").startswith("messages[0].content[0]")


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "url", "url": METADATA}},
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
        {"type": "image", "source": {"type": "s3", "url": METADATA}},
        {"type": "document", "source": {"type": "url", "url": METADATA}},
        {
            "type": "document",
            "source": {
                "type": "content",
                "content": [{"type": "image", "source": {"type": "url", "url": METADATA}}],
            },
        },
        {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": [{"type": "image", "source": {"type": "url", "url": METADATA}}],
        },
        {"type": "container_upload", "file_id": "file_1"},
        {"type": "image_url", "image_url": {"url": METADATA}},
    ],
)
def test_messages_show_no_address_of_this_network_and_no_file(block: Any) -> None:
    assert refusal("messages", messages=[{"role": "user", "content": [block]}]).param


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_image", "image_url": METADATA}]},
        {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
        {"role": "user", "content": [{"type": "input_file", "file_url": METADATA}]},
        {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
        {"role": "user", "content": [{"type": "input_file", "file_data": METADATA}]},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": METADATA}],
        },
        {
            "type": "computer_call_output",
            "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": METADATA},
        },
    ],
)
def test_responses_show_no_address_of_this_network_and_no_file(item: Any) -> None:
    assert (refusal("responses", input=[item]).param or "").startswith("input[0]")


def test_images_and_files_as_data_or_of_the_internet_pass() -> None:
    url = "https://example.com/a.png"
    data = "data:image/png;base64,iVBO"
    chat = [
        {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": data},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JV", "filename": "a"}},
        {"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}},
    ]
    assert messages(*chat, dialect="chat") == chat
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
        {"type": "document", "source": {"type": "url", "url": url}, "title": "t"},
        {
            "type": "tool_result",
            "tool_use_id": "t",
            "is_error": True,
            "content": [{"type": "text", "text": "x"}],
        },
        {"type": "search_result", "source": "s", "title": "t", "content": []},
    ]
    assert messages(*blocks) == blocks
    parts = [
        {"type": "input_text", "text": "t"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,JV", "filename": "a"},
    ]
    assert items({"role": "user", "content": parts}) == [{"role": "user", "content": parts}]


def test_nesting_has_an_end() -> None:
    block: Any = {"type": "text", "text": "x"}
    for _ in range(60):
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert "nested" in str(refusal("messages", messages=[{"role": "user", "content": [block]}]))


# ---------------------------------------------------------------- what providers made


def test_opaque_blocks_of_providers_pass_unchanged() -> None:
    blocks = [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"q": 1}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [{"type": "web_search_result", "url": "u", "encrypted_content": "e"}],
        },
        {"type": "text", "text": "t", "citations": [{"encrypted_index": "i"}]},
        {"type": "compaction", "content": "c", "encrypted_content": "e"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"api_base": SINK}},
    ]
    assert messages(*blocks, role="assistant") == blocks
    rows = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "e"},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "e"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "x"}},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}],
        },
    ]
    assert items(*rows) == rows
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    opaque = {
        "thinking_blocks": [thought, {"type": "redacted_thinking", "data": "d"}],
        "reasoning_items": [{"type": "reasoning", "id": "rs", "encrypted_content": "e"}],
        "provider_specific_fields": {"compaction_blocks": [{"type": "compaction", "content": "c"}]},
        "reasoning_content": "t",
    }
    turn = {"role": "assistant", "content": "x"} | opaque
    assert cloud_body("chat", {"messages": [turn]}, "g")["messages"] == [turn]


def test_unknown_blocks_of_a_turn_are_left_out() -> None:
    text = {"type": "text", "text": "t"}
    assert messages({"type": "hologram", "url": METADATA}, text, role="assistant") == [text]
    assert items({"type": "hologram"}, {"role": "user", "content": "x"}) == [
        {"role": "user", "content": "x"}
    ]
    hologram = {"role": "assistant", "content": [{"type": "hologram"}]}
    body = {"messages": [USER, hologram], "input": [hologram, USER]}
    assert cloud_body("messages", body, "g")["messages"] == [USER]  # none is left empty
    assert cloud_body("responses", body, "g")["input"] == [USER]
    assert cloud_body("chat", body, "g")["messages"][1]["content"] == ""
    turn = {"role": "assistant", "content": "x"}
    odd = turn | {
        "reasoning_items": [{"type": "reasoning", "id": "rs_of_another"}, {"type": "message"}],
        "provider_specific_fields": {"tool_results": [{"type": "hologram"}], "api_base": SINK},
        "audio": {"id": "a", "x": 1},
    }
    assert cloud_body("chat", {"messages": [odd]}, "g")["messages"] == [
        turn
        | {"reasoning_items": [], "provider_specific_fields": {"tool_results": []}}
        | {"audio": {"id": "a"}}
    ]
