"""An answer obeys the schema where jsonschema says so, and is nothing but JSON."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.structured import AREAS, SCHEMA, is_valid, obeys
from hearth.commands.bench.workloads.timed_stream import TimedAnswer

words = st.sampled_from(["low", "high", "read", "edit", "cache", "proxy", "other", ""])
leaves = words | st.booleans() | st.none() | st.integers(0, 2)
steps = st.fixed_dictionaries(
    {"action": st.sampled_from(["read", "edit"]), "area": words, "is_risky": leaves},
    optional={"more": leaves},
)
plans = st.fixed_dictionaries(
    {"severity": words, "is_blocking": leaves},
    optional={"steps": st.lists(steps, max_size=4) | leaves, "more": leaves},
)
GOOD: dict[str, Any] = {
    "severity": "low",
    "is_blocking": False,
    "steps": [{"action": "read", "area": area, "is_risky": True} for area in AREAS[:3]],
}


def answer(text: str, error: str = "") -> TimedAnswer:
    return TimedAnswer(0.0, 2.0, (1.0,), 9, 9, text, error)


@given(plans | leaves | st.lists(leaves, max_size=3))
def test_it_obeys_where_jsonschema_says_so(value: Any) -> None:
    assert obeys(value, SCHEMA) is jsonschema.Draft202012Validator(SCHEMA).is_valid(value)


@pytest.mark.parametrize("part", ["severity", "is_blocking", "steps"])
def test_a_plan_obeys_until_a_part_is_missing(part: str) -> None:
    assert is_valid(answer(json.dumps(GOOD))) and is_valid(answer(" \n" + json.dumps(GOOD)))
    assert not is_valid(answer(json.dumps({k: v for k, v in GOOD.items() if k != part})))


def test_a_field_that_the_schema_does_not_name_is_not_valid() -> None:
    step = {**GOOD["steps"][0], "more": True}
    for plan in ({**GOOD, "more": True}, {**GOOD, "steps": [step, *GOOD["steps"][1:]]}):
        assert not is_valid(answer(json.dumps(plan)))


@pytest.mark.parametrize("text", ["", "{", "Here it is: {}", json.dumps(GOOD) + " Done."])
def test_text_around_json_is_not_valid(text: str) -> None:
    assert not is_valid(answer(text))


def test_a_refused_answer_is_not_valid() -> None:
    assert not is_valid(answer(json.dumps(GOOD), "400 no such field"))
