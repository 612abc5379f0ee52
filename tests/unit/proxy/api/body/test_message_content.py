"""Checks that items of other servers' tools are read as text, and omissions are logged once."""

import logging

import pytest

from hearth.proxy.api.body.message_content import log_left_out, readable_texts


def test_what_is_left_out_is_one_line_without_repetition(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_left_out([])
    log_left_out(["web_search", "image", "web_search", "x" * 500, "A text, not a type"])
    log_left_out(str(number) for number in range(1_000))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "left out kinds='(other), image, web_search'"
    assert len(second) < 200


def test_what_is_no_text_is_not_read_as_such() -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": "iVBO", "content": "iVBO"}
    assert readable_texts({"type": "x", "source": picture, "content": [" ", "a"]}) == ["a"]
