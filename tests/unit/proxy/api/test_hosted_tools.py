"""Checks that items of other servers' tools are read as text, and omissions are logged once."""

import logging
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.body import hosted_tools

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "source", "x"]), inner)
    ),
)


def test_what_is_left_out_is_one_line_without_repetition(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hosted_tools.note([])
    assert caplog.records == []
    hosted_tools.note(["web_search", "image", "web_search", "x" * 500, "A text, not a type"])
    (record,) = caplog.records
    assert record.getMessage() == "left out kinds='(other), image, web_search'"
    hosted_tools.note(str(number) for number in range(1_000))
    assert len(caplog.records[1].getMessage()) < 200


def test_what_is_no_text_is_not_read_as_such() -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": "iVBO", "content": "iVBO"}
    assert hosted_tools.texts_of({"type": "x", "source": picture, "content": [" ", "a"]}) == ["a"]
    assert hosted_tools.texts_of({"type": "image_generation_call", "result": "iVBO"}) == []


@given(JSON)
def test_any_json_is_read(value: Any) -> None:
    assert all(type(text) is str and text.strip() for text in hosted_tools.texts_of(value))
