"""Answers taken apart, case by case, and the families' templates that the cases come from."""

from typing import Any

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.harness.model_families import family, tools_for
from tests.helpers.worker.output_formats import read_whole

READ = ToolCall("read_file", {"path": "a.py", "limit": 3, "range": {"lines": [1, 20], "raw": True}})
LIST = ToolCall("list_dir", {"path": "src/ü"})
TOOLS = tools_for([READ, LIST])
CALL_TEXT = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>'


def read(name: str, text: str, is_thinking: bool = False) -> AnswerParts:
    return read_whole(family(name).reader, text, is_thinking, TOOLS)


# ---------------------------------------------------------------- what the families are


@pytest.mark.parametrize(
    ("name", "options", "is_open"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("qwen3_5", {}, True),
        ("qwen3_5", {"enable_thinking": False}, False),
        ("glm4", {}, False),
        ("harmony", {}, False),
        ("mistral", {}, False),
    ],
)
def test_the_generation_prompt_tells_whether_thinking_is_open(
    name: str, options: dict[str, Any], is_open: bool
) -> None:
    assert family(name).is_thinking(**options) == is_open


def test_a_harmony_prompt_that_begins_the_analysis_leaves_it_open() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    assert family("harmony").reader.is_thinking_open(prompt)


# ---------------------------------------------------------------- calls between marks


@pytest.mark.parametrize("name", ["qwen3", "harmony", "llama3", "mistral"])
def test_arguments_in_json_may_quote_any_mark(name: str) -> None:
    each = family(name)
    marks = [mark for mark in (*each.marks, *each.controls) if mark not in HARMONY_BOUNDARIES]
    call = ToolCall("write_file", {"text": "".join(marks), "name": CALL_TEXT})
    parts = AnswerParts(calls=(call,))
    assert read_whole(each.reader, each.written(parts), False, tools_for([call])) == parts


HARMONY_BOUNDARIES = ("<|start|>", "<|end|>", "<|call|>", "<|return|>")


@pytest.mark.parametrize("name", ["qwen3_5", "glm4"])
@pytest.mark.parametrize("quoted", ["a</tool_call>b", "<tool_call>", CALL_TEXT, "</think>"])
def test_a_mark_in_an_argument_is_a_quoted_one(name: str, quoted: str) -> None:
    each = family(name)
    parts = AnswerParts("why", "", (ToolCall("list_dir", {"path": quoted}), LIST))
    assert read(name, each.written(parts), each.is_thinking()) == parts
