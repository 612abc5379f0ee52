"""Checks that each family's output is parsed as it was meant, and that any text can be parsed."""

import time
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.model_families import FAMILIES, Family, family, tools_for
from tests.helpers.worker.output_formats import MARKS, PIECES

NAMES = st.sampled_from(["read_file", "bash", "f", "Edit-2", "mcp__x__y"])
KEYS = st.sampled_from(["path", "limit", "old_string", "k9", "größe"])
# Hypothesis also tries strings that it finds in our sources: marks are kept out by name.
TAGS = ("function", "parameter", "invoke", "arg_", "[ARGS]")
WORDS = st.text(
    alphabet=st.one_of(
        st.sampled_from("abz 019 .,:;\"'\\/{}[]()=&%$#@!?*_-+`~^ \n\t"),
        st.characters(min_codepoint=0x20, exclude_categories=["Cs", "Cn", "Co"]),
    ),
    max_size=40,
).filter(lambda text: not any(mark in text for mark in (*MARKS, *TAGS)))
TEXTS = WORDS.map(str.strip)
QUOTES = st.sampled_from(["<tool_call>", "a</tool_call>b", "<think>x</think>", "[TOOL_CALLS]"])
NUMBERS = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(-1e15, 1e15).map(lambda x: x + 0.0), st.booleans()
)
NESTED = st.recursive(
    st.one_of(st.none(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=8,
)
VALUES = st.one_of(
    TEXTS, QUOTES, NUMBERS, st.lists(NESTED, max_size=3), st.dictionaries(WORDS, NESTED)
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


@st.composite
def said(draw: st.DrawFn, each: Family) -> AnswerParts:
    """Parts that this family can write: no marks of its own in the texts."""
    calls = tuple(
        ToolCall(name, draw(ARGUMENTS))
        for name in draw(st.lists(NAMES, max_size=3 if each.calls_max is None else each.calls_max))
    )
    if each.name in ("qwen3_5", "glm4"):
        calls = one_type_for_each_argument(calls)
    reasoning = draw(TEXTS) if each.thinks else ""
    content = "" if calls and each.name == "llama3" else draw(TEXTS)
    return AnswerParts(reasoning, content, calls)


def one_type_for_each_argument(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """Their formats write plain text, which the tool's schema tells how to read."""
    types: dict[tuple[str, str], type] = {}
    kept = []
    for call in calls:
        assert isinstance(call.arguments, dict)
        fitting = {
            key: value
            for key, value in call.arguments.items()
            if types.setdefault((call.name, key), type(value)) is type(value)
            and not (isinstance(value, str) and value.lower() == "null")
        }
        kept.append(ToolCall(call.name, fitting))
    return tuple(kept)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=60)
def test_what_a_family_writes_is_read_as_what_was_meant(name: str, data: st.DataObject) -> None:
    each = family(name)
    parts = data.draw(said(each))
    found = each.reader.read(each.written(parts), is_open(name), tools_for(parts.calls))
    assert found == parts
    if name != "qwen3_5":  # whose parser makes 5.0 an integer
        assert repr(found) == repr(parts), "true is not 1"


@cache
def is_open(name: str) -> bool:
    return family(name).is_thinking()


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=20)
def test_a_turn_survives_its_own_tokens(name: str, data: st.DataObject) -> None:
    """The marks are in the text that the worker makes of sampled ids."""
    each = family(name)
    parts = data.draw(said(each))
    ids = each.tokenizer.encode(each.written(parts), add_special_tokens=False)
    detokeniser = vocabulary(name).detokeniser()
    text = "".join(detokeniser.add(token) for token in ids)
    assert each.reader.read(text, is_open(name), tools_for(parts.calls)) == parts


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(family(name).tokenizer)


SOUP = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
ODD_TOOLS = st.sampled_from(
    [[], [None], [{}], [{"function": None}], [{"function": {"name": "f"}}], ["f"], [{"name": []}]]
)


@pytest.mark.parametrize("name", FAMILIES)
@given(
    text=st.one_of(SOUP, st.text(st.characters(exclude_categories=["Cs"]), max_size=60)),
    is_thinking=st.booleans(),
    tools=ODD_TOOLS,
)
@settings(max_examples=100)
def test_any_text_is_read_and_gives_json(
    name: str, text: str, is_thinking: bool, tools: list[Any]
) -> None:
    parts = family(name).reader.read(text, is_thinking, tools)
    assert isinstance(parts.reasoning, str) and isinstance(parts.content, str)
    for call in parts.calls:
        assert call.name.strip()
        assert is_json(call.arguments) and isinstance(call.arguments, dict | str)


def is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "harmony"])
@given(text=SOUP)
@settings(max_examples=60)
def test_text_without_a_call_or_a_think_mark_is_content_as_written(name: str, text: str) -> None:
    reader = family(name).reader
    text = text.replace("think>", "thing>")
    parts = reader.read(text, False, [])
    assume(not parts.calls)
    assert parts.content == text


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("qwen3", '<tool_call>{"a": ['),
        ("qwen3", "</tool_call>{"),
        ("qwen3", "<tool_call>" + " " * 30),
        ("qwen3_5", "<tool_call><function=</tool_call>"),
        ("glm4", "<tool_call>f<arg_key>"),
        ("glm4", "<tool_call>f<arg_key></tool_call>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{<|end|>"),
        ("mistral", "[TOOL_CALLS]a[ARGS]{"),
    ],
)
def test_a_model_that_repeats_itself_is_read_in_no_time(name: str, piece: str) -> None:
    start = time.process_time()
    family(name).reader.read("<tool_call>{" + piece * 3_000, False, [])
    assert time.process_time() - start < 2
