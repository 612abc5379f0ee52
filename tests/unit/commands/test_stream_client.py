"""Whatever a server answers is an outcome: garbage, answers without an end, lists of nothing."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.stream_client import (
    COUNT_MAX,
    READERS,
    Reading,
    tokens_of,
)

pytestmark = pytest.mark.process
KEYS = ("choices", "delta", "usage", "content", "error", "type", "message", "response", "text")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)
COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")


@given(
    st.sampled_from(sorted(READERS)),
    st.dictionaries(st.sampled_from((*COUNTS, "prompt_tokens_details")), JSON, min_size=1),
    st.dictionaries(st.sampled_from(("prefilled", "source")), JSON),
)
def test_any_usage_counts_or_is_none(
    dialect: str, usage: dict[str, Any], kv_cache: dict[str, Any]
) -> None:
    tokens = tokens_of(dialect, Reading(usage=usage, kv_cache=kv_cache))
    if tokens is not None:
        counts = (tokens.prompt, tokens.cached, tokens.prefilled, tokens.completion)
        assert all(type(each) is int and 0 <= each <= 3 * COUNT_MAX for each in counts)
        assert isinstance(tokens.source, str)
