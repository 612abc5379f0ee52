"""OpenAI's `prediction` is a text, whole or in parts; whatever else comes is refused by name."""

from typing import Any

import pytest

from hearth.proxy.api import chat_completions
from hearth.proxy.api.body.prediction import CHARS_MAX, PARTS_MAX, read_prediction
from hearth.shared.errors import RequestError


def predicted(content: Any, **fields: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content, **fields}}


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("class User {\n}", "class User {\n}"),
        ([text("a\n"), text("b"), text("")], "a\nb"),
        ([], ""),
        ("", ""),
        ("x" * CHARS_MAX, "x" * CHARS_MAX),
    ],
    ids=["text", "parts", "no parts", "empty", "the longest"],
)
def test_a_prediction_is_its_text_with_nothing_between_its_parts(content: Any, read: str) -> None:
    assert read_prediction(predicted(content), 1) == read


@pytest.mark.parametrize("body", [{}, {"prediction": None}])
def test_without_a_prediction_there_is_none(body: dict[str, Any]) -> None:
    assert read_prediction(body, 8) == ""


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("the text", "prediction"),
        ([text("a")], "prediction"),
        (False, "prediction"),
        ({}, "prediction.type"),
        ({"type": "tokens", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [text("a")] * (PARTS_MAX + 1)}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
        (
            {"type": "content", "content": [text("a"), {"type": "image_url"}]},
            "prediction.content[1].type",
        ),
        ({"type": "content", "content": [text(None)]}, "prediction.content[0].text"),
        ({"type": "content", "content": [text(["a"])]}, "prediction.content[0].text"),
    ],
)
def test_a_malformed_prediction_is_a_400_that_names_the_place(value: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prediction": value}
    with pytest.raises(RequestError, match="allowed is") as caught:
        chat_completions.parse(body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_prediction_that_is_too_long_says_by_how_much() -> None:
    with pytest.raises(
        RequestError, match=r"has 1,000,001 characters.*Remove at least 1\."
    ) as long:
        read_prediction(predicted([text("x" * CHARS_MAX), text("y")]), 1)
    assert (long.value.status, long.value.code) == (400, "prediction_too_long")


def test_several_choices_have_no_prediction() -> None:
    with pytest.raises(RequestError, match="n is 2; allowed is 1 together with prediction"):
        read_prediction(predicted("a"), 2)
