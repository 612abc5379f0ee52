"""A cloud model's body holds what its provider acts upon, and nothing that LiteLLM or we made."""

import copy
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given, settings, strategies as st
from litellm.types.utils import all_litellm_params

from hearth.proxy.gateway.cloud import cloud_fields
from hearth.proxy.gateway.cloud.cloud_bodies import (
    HEADER_CHARS_MAX,
    CloudDialect,
    cloud_body,
    cloud_headers,
)
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.gateway.gateway import cloud_json
from hearth.shared.errors import RequestError
from hearth.shared.paths import PROJECT_DIR

CASES = yaml.safe_load((PROJECT_DIR / "tests/data/cloud_bodies.yaml").read_text())["cases"]
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
# What other servers act upon, and LiteLLM does not list.
MORE = (
    *("model_list", "user_config", "router_settings_override", "extra_query", "no-log"),
    "mcp_servers",
)
REFUSED = {"thread", "conversation", "prompt", "background"}
FORBIDDEN = ({*all_litellm_params, *MORE} - {"metadata", "prompt"}) | {"headers", "extra_body"}
DIALECTS = st.sampled_from(list(SMALL))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def body_of(kind: str, value: Any) -> tuple[CloudDialect, dict[str, Any]]:
    """Return the dialect and the body that a case of this kind means."""
    dialect, _, role = kind.partition(" ")
    if dialect == "turn":
        return "chat", {"messages": [USER, {"role": "assistant"} | value]}
    if dialect == "items":
        return "responses", {"input": value}
    if role:
        rows = [{"role": role, "content": value}]
        return dialect, {"input" if dialect == "responses" else "messages": rows}
    return dialect, value


def ordered(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_body_goes_as_the_table_says(case: dict[str, Any]) -> None:
    (kind, value), *outcome = case.items()
    expected = dict(outcome)
    for refused in value if "each" in expected else [value] if "refused" in expected else []:
        dialect, body = body_of(kind, [refused] if "each" in expected else refused)
        with pytest.raises(RequestError) as caught:
            cloud_body(dialect, body, "g")
        param = expected.get("each", expected.get("refused"))
        assert caught.value.status == 400 and (caught.value.param or "").startswith(param), refused
    if not {"each", "refused"} & set(expected):
        dialect, body = body_of(kind, value)
        before = copy.deepcopy(body)
        _, sent = body_of(kind, expected.get("sent", value))
        assert cloud_body(dialect, body, "g") == sent | {"model": "g"}
        assert body == before


@pytest.mark.parametrize("dialect", SMALL)
def test_nothing_that_litellm_acts_on_passes_and_what_is_asked_stays(dialect: CloudDialect) -> None:
    assert len(FORBIDDEN) > 300
    body = dict.fromkeys(FORBIDDEN, "https://sink.example/v1") | SMALL[dialect]
    before = orjson.dumps(body)
    assert cloud_body(dialect, body, "group") == SMALL[dialect] | {"model": "group"}
    assert orjson.dumps(body) == before


@given(dialect=DIALECTS, named=st.dictionaries(st.text(max_size=9), JSON))
@settings(max_examples=300)
def test_unknown_names_never_pass(dialect: CloudDialect, named: dict[str, Any]) -> None:
    known = cloud_fields.BODY[dialect].names
    unknown = {name: value for name, value in named.items() if name not in known}
    assert cloud_body(dialect, unknown | SMALL[dialect], "g") == SMALL[dialect] | {"model": "g"}


@given(dialect=DIALECTS, data=st.data())
@settings(max_examples=300)
def test_allowed_fields_pass_as_they_are(dialect: CloudDialect, data: st.DataObject) -> None:
    allowed = cloud_fields.BODY[dialect]
    judged = {*allowed.rules, "tool_choice", "parallel_tool_calls", "thinking"}
    judged |= {"context_management"}
    names = sorted(allowed.names - judged - {"model", "prompt", "input", "messages"})
    fields = data.draw(st.dictionaries(st.sampled_from(names), JSON))
    body = SMALL[dialect] | fields
    assert ordered(cloud_body(dialect, body, "g")) == ordered(body | {"model": "g"})


@given(dialect=DIALECTS, data=st.data(), odd=JSON)
@settings(max_examples=300)
def test_any_shape_is_a_body_or_a_refusal(
    dialect: CloudDialect, data: st.DataObject, odd: Any
) -> None:
    name = data.draw(st.sampled_from(sorted(cloud_fields.BODY[dialect].names)))
    row = {"role": "assistant", name: odd}
    for body in ({name: odd}, {"messages": [row]}, {"input": [row]}, {"tools": [row]}):
        try:
            assert cloud_body(dialect, SMALL[dialect] | body, "g")["model"] == "g"
        except RequestError as error:
            assert error.status == 400


def test_kinds_that_are_left_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "mcp"}, {"type": "file_search"}, {"type": "litellm_x"}]
    with caplog.at_level("INFO"):
        cloud_body("responses", SMALL["responses"] | {"tools": tools}, "g")
    assert "file_search, litellm_x, mcp" in caplog.text


@pytest.mark.parametrize("depth", [60, 5_000])
def test_nesting_has_an_end(depth: int) -> None:
    block: Any = {"type": "text", "text": "x"}
    tool: Any = {"type": "function", "name": "f"}
    for _ in range(depth):
        block = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        tool = {"type": "namespace", "name": "n", "tools": [tool]}
    rows = [{"role": "user", "content": [block]}]
    bodies: dict[CloudDialect, Any] = {
        "messages": {"messages": rows},
        "responses": {"tools": [tool]},
    }
    for dialect, body in bodies.items():
        with pytest.raises(RequestError, match="nested"):
            cloud_body(dialect, body, "g")


BOTH = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("model", "provider", "asked", "sent"),
    [
        ("openai/m", "", BOTH, BOTH),
        ("m", "hosted_vllm", BOTH, BOTH),
        ("anthropic/claude", "", BOTH, {}),
        ("openai/m", "", {"add_generation_prompt": True}, {}),
        ("openai/m", "", {"continue_final_message": {"a": 1}}, {}),
    ],
)
def test_a_message_is_continued_by_servers_that_know_the_field_for_it(
    model: str, provider: str, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    to = Deployment("id", "g", model, provider=provider)
    body = SMALL["chat"] | asked
    assert orjson.loads(cloud_json("chat", body, to)) == SMALL["chat"] | {"model": "g"} | sent


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("anthropic-version", ["latest"]),
        ("anthropic-beta", ["a\r\nx-api-key: b", "a, , b", "a" * (HEADER_CHARS_MAX + 1)]),
        ("user-agent", ["a\n", "caf\xe9", ""]),
        ("x-litellm-tags", ["a"]),
    ],
)
def test_headers_of_odd_values_stay_behind(name: str, values: list[str]) -> None:
    for value in values:
        assert cloud_headers({name: value}) == [(b"content-type", b"application/json")]
    kept = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-1,b-2", "user-agent": "x/1 (y)"}
    assert cloud_headers(kept)[1:] == [(k.encode(), v.encode()) for k, v in kept.items()]


def schema_of(definitions: int, values: int, place: str) -> dict[str, Any]:
    parts = {f"d{number}": {} for number in range(definitions)}
    return {"type": "object", "anyOf": [{"$ref": "#/$defs/d0"}] * (values // 2), place: parts}


@pytest.mark.parametrize("place", ["$defs", "definitions"])
@pytest.mark.parametrize(
    ("definitions", "values", "is_refused"),
    [(1_000, 20_000, True), (1_000, 8_000, False), (0, 100_000, False), (3_000, 10, False)],
)
def test_many_values_and_many_definitions_are_refused_wherever_they_stand(
    place: str, definitions: int, values: int, is_refused: bool
) -> None:
    schema = {"items": schema_of(definitions, values, place)}
    function, form = {"name": "f", "parameters": schema}, {"type": "json_schema", "schema": schema}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies: tuple[tuple[CloudDialect, dict[str, Any]], ...] = (
        ("chat", {"tools": [{"type": "function", "function": function}]}),
        ("chat", {"functions": [function]}),
        ("chat", {"response_format": named}),
        ("messages", {"tools": [{"name": "f", "input_schema": schema}]}),
        ("messages", {"output_config": {"format": form}}),
        ("messages", {"output_format": form}),
        ("responses", {"tools": [{"type": "function"} | function]}),
        ("responses", {"text": {"format": form | {"name": "x"}}}),
    )
    for dialect, body in bodies:
        if not is_refused:
            assert cloud_body(dialect, SMALL[dialect] | body, "g")
            continue
        with pytest.raises(RequestError, match=r"1,000 definitions.*10,000,000.*Define fewer"):
            cloud_body(dialect, SMALL[dialect] | body, "g")
