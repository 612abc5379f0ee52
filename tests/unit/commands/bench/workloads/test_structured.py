"""An answer obeys the schema where jsonschema says so, and is nothing but JSON."""

from typing import Any

import jsonschema
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.structured import SCHEMA, obeys
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


def answer(text: str, error: str = "") -> TimedAnswer:
    return TimedAnswer(0.0, 2.0, (1.0,), 9, 9, text, error)


@given(plans | leaves | st.lists(leaves, max_size=3))
def test_it_obeys_where_jsonschema_says_so(value: Any) -> None:
    assert obeys(value, SCHEMA) is jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
