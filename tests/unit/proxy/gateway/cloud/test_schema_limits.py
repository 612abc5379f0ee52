"""Schemas that are immense for LiteLLM never reach it."""

import inspect
from typing import Any

import pytest
from litellm.litellm_core_utils.prompt_templates.common_utils import unpack_defs

from hearth.proxy.gateway.cloud.cloud_bodies import cloud_body
from hearth.shared.errors import RequestError


def schema_of(definitions: int, values: int, place: str = "$defs") -> dict[str, Any]:
    parts = {f"d{number}": {} for number in range(definitions)}
    return {"type": "object", "anyOf": [{"$ref": "#/$defs/d0"}] * (values // 2), place: parts}


def bodies(schema: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    function = {"name": "f", "parameters": schema}
    named = {"name": "x", "schema": schema}
    return [
        ("chat", {"tools": [{"type": "function", "function": function}]}),
        ("chat", {"functions": [function]}),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": named}}),
        ("messages", {"tools": [{"name": "f", "input_schema": schema}]}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("messages", {"output_format": {"type": "json_schema", "schema": schema}}),
        ("responses", {"tools": [{"type": "function"} | function]}),
        ("responses", {"text": {"format": {"type": "json_schema"} | named}}),
    ]


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_many_values_and_many_definitions_are_refused_wherever_they_stand(place: str) -> None:
    for dialect, body in bodies({"items": schema_of(1_000, 20_000, place)}):
        with pytest.raises(RequestError, match=r"1,000 definitions.*10,000,000.*Define fewer"):
            cloud_body(dialect, body | {"messages": []}, "g")
    for counts in ((1_000, 8_000), (0, 100_000), (3_000, 10)):
        for dialect, body in bodies(schema_of(*counts, place)):
            assert cloud_body(dialect, body | {"messages": []}, "g")


def test_litellm_leaves_its_limit_of_references_out_as_long_as_we_set_it() -> None:
    """Where this fails, its callers may pass one: then `_limit_schemas` has no use."""
    limit = inspect.signature(unpack_defs).parameters["max_inlined_bytes"]
    assert limit.default is None
