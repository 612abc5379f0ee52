"""A cloud model's body holds what its provider acts upon, and nothing that LiteLLM or we made."""

import copy
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given, strategies as st
from litellm.types.utils import all_litellm_params

from hearth.proxy.gateway import cloud_fields
from hearth.proxy.gateway.cloud_bodies import (
    HEADER_CHARS_MAX,
    CloudDialect,
    cloud_body,
    cloud_headers,
)
from hearth.proxy.gateway.cloud_fields import check_data, check_url, is_public_url
from hearth.proxy.gateway.gateway import cloud_json
from hearth.proxy.gateway.routing_table import Deployment
from hearth.shared.errors import RequestError
from hearth.shared.paths import PROJECT_DIR

DATA = yaml.safe_load((PROJECT_DIR / "tests/data/cloud_bodies.yaml").read_text())
CASES = DATA["cases"]
ATTACKS = yaml.safe_load((PROJECT_DIR / "tests/data/litellm_attacks.yaml").read_text())
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
MORE = ("router_settings_override", "no-log", "mcp_servers", "extra_body")
FORBIDDEN = {*all_litellm_params, *ATTACKS["fields"], *ATTACKS["names"], *MORE}
FORBIDDEN -= {"metadata", "prompt"}
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
def test_unknown_names_never_pass(dialect: CloudDialect, named: dict[str, Any]) -> None:
    known = cloud_fields.BODY[dialect].names
    unknown = {name: value for name, value in named.items() if name not in known}
    assert cloud_body(dialect, unknown | SMALL[dialect], "g") == SMALL[dialect] | {"model": "g"}


@given(dialect=DIALECTS, data=st.data())
def test_allowed_fields_pass_as_they_are(dialect: CloudDialect, data: st.DataObject) -> None:
    allowed = cloud_fields.BODY[dialect]
    judged = {*allowed.rules, "tool_choice", "parallel_tool_calls", "thinking"}
    judged |= {"context_management"}
    names = sorted(allowed.names - judged - {"model", "prompt", "input", "messages"})
    fields = data.draw(st.dictionaries(st.sampled_from(names), JSON))
    body = SMALL[dialect] | fields
    assert ordered(cloud_body(dialect, body, "g")) == ordered(body | {"model": "g"})


@given(dialect=DIALECTS, data=st.data(), odd=JSON)
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


@pytest.mark.parametrize(("model", "provider", "asked", "sent"), DATA["continued"])
def test_a_message_is_continued_by_servers_that_know_the_field_for_it(
    model: str, provider: str, asked: dict[str, Any], sent: dict[str, Any]
) -> None:
    to = Deployment("id", "g", model, provider=provider)
    body = SMALL["chat"] | asked
    assert orjson.loads(cloud_json("chat", body, to)) == SMALL["chat"] | {"model": "g"} | sent


def test_headers_of_odd_values_stay_behind() -> None:
    for name, values in DATA["odd_headers"].items():
        for value in values:
            given = {name: value.replace("LONG", "a" * (HEADER_CHARS_MAX + 1))}
            assert cloud_headers(given) == [(b"content-type", b"application/json")]
    kept = {name: str(value) for name, value in DATA["headers"].items()}
    assert cloud_headers(kept)[1:] == [(k.encode(), v.encode()) for k, v in kept.items()]


@pytest.mark.parametrize("place", ["$defs", "definitions"])
@pytest.mark.parametrize(
    ("definitions", "values", "is_refused"),
    [(1_000, 20_000, True), (1_000, 8_000, False), (0, 100_000, False), (3_000, 10, False)],
)
def test_many_values_and_many_definitions_are_refused_wherever_they_stand(
    place: str, definitions: int, values: int, is_refused: bool
) -> None:
    parts = {f"d{number}": {} for number in range(definitions)}
    named = [{"$ref": "#/$defs/d0"}] * (values // 2)
    schema = orjson.dumps({"items": {"type": "object", "anyOf": named, place: parts}})
    for case in DATA["schemas"]:
        filled = orjson.loads(orjson.dumps(case).replace(b'"SCHEMA"', schema))
        ((dialect, body),) = filled.items()
        if not is_refused:
            assert cloud_body(dialect, SMALL[dialect] | body, "g")
            continue
        with pytest.raises(RequestError, match=r"1,000 definitions.*10,000,000.*Define fewer"):
            cloud_body(dialect, SMALL[dialect] | body, "g")


URLS = yaml.safe_load((PROJECT_DIR / "tests/data/cloud_urls.yaml").read_text())


@pytest.mark.parametrize("url", URLS["public"])
def test_a_public_host_passes(url: str) -> None:
    assert is_public_url(url)
    check_url(url, "p")


@pytest.mark.parametrize("url", [*URLS["private"], "https://example.com/" + "a" * 5_000])
def test_anything_else_is_refused_with_its_place_and_a_remedy(url: str) -> None:
    assert not is_public_url(url)
    with pytest.raises(RequestError) as caught:
        check_url(url, "messages[0].content[1].image_url.url")
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert "data: URL" in str(caught.value)
    assert len(url) < 9 or url not in str(caught.value)


def test_data_passes_bare_or_as_a_url() -> None:
    check_url("data:image/png;base64,iVBO", "p")
    for data in ("iVBORw0KGgo=", "data:application/pdf;base64,JVBE"):
        check_data(data, "p")
    for url in ("http://169.254.169.254/", " gs://bucket/x"):
        with pytest.raises(RequestError):
            check_data(url, "p")
