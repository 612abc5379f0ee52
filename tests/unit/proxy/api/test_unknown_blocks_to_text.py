"""Checks that items of other servers' tools are read as text, and omissions are logged once."""

import logging
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.body import unknown_blocks_to_text as unknown_blocks

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "source", "x"]), inner)
    ),
)


def test_what_is_left_out_is_one_line_without_repetition(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    unknown_blocks.note([])
    assert caplog.records == []
    unknown_blocks.note(["web_search", "image", "web_search", "x" * 500, "A text, not a type"])
    (record,) = caplog.records
    assert record.getMessage() == "left out kinds='(other), image, web_search'"
    unknown_blocks.note(str(number) for number in range(1_000))
    assert len(caplog.records[1].getMessage()) < 200


def test_what_is_no_text_is_not_read_as_such() -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": "iVBO", "content": "iVBO"}
    assert unknown_blocks.texts_of({"type": "x", "source": picture, "content": [" ", "a"]}) == ["a"]
    assert unknown_blocks.texts_of({"type": "image_generation_call", "result": "iVBO"}) == []


@given(JSON)
def test_any_json_is_read(value: Any) -> None:
    assert all(type(text) is str and text.strip() for text in unknown_blocks.texts_of(value))
