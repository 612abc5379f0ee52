"""Outputs of every format, read whole: each against what it is known to say. And the limits."""

import json

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.lookahead_buffer import TRIM_CHARS
from hearth.worker.stream.reasoning_and_tool_parser import REREAD_CHARS_MAX
from tests.helpers.worker.output_formats import OUTPUTS, joined, outputs, reader, streamed, tool

FILES = sorted(path.stem for path in OUTPUTS.glob("*.jsonl"))
NOW = '{"name": "now", "arguments": {}}'
TOOLS = [tool(("now", {}))]


@pytest.mark.parametrize("name", FILES)
def test_an_output_says_what_it_is_known_to_say(name: str) -> None:
    for output in outputs(name):
        splitter = output.splitter()
        joined(streamed(splitter, [output.text], output.is_complete))
        assert splitter.parts == output.parts, output.text
        assert repr(splitter.parts) == repr(output.parts), "true is not 1"


def test_what_was_read_long_ago_is_let_go_but_not_what_stands_beside_a_mark() -> None:
    text = "x" * TRIM_CHARS + "`</think>` `<think>`"
    splitter = reader("qwen3").splitter(False, TOOLS)
    streamed(splitter, text, is_complete=True)
    assert splitter.parts == AnswerParts("", text)


@pytest.mark.parametrize("piece_chars", [1, 3, 7, 40])
def test_a_long_call_of_many_values_loses_none_where_read_text_is_let_go(piece_chars: int) -> None:
    arguments = {"edits": [{"line": number} for number in range(TRIM_CHARS // 2)], "count": 3}
    text = f"<tool_call>\n{json.dumps({'name': 'edit', 'arguments': arguments})}\n</tool_call>"
    tools = [tool(("edit", {"edits": "array", "count": "integer"}))]
    splitter = reader("qwen3").splitter(False, tools)
    cuts = range(0, len(text), piece_chars)
    streamed(splitter, [text[at : at + piece_chars] for at in cuts], is_complete=True)
    assert splitter.parts == AnswerParts("", "", (ToolCall("edit", arguments),))


def test_of_several_calls_those_before_a_broken_one_count() -> None:
    for format, text in (
        ("qwen3", f'<tool_call>{NOW}\n{{"bad": 1}}</tool_call>'),
        ("mistral", f'[TOOL_CALLS][{NOW}, {{"bad": 1}}]'),
        ("minimax_m2", f"<minimax:tool_call>{NOW}<b></minimax:tool_call>"),
    ):
        parts = reader(format).read(text, False, TOOLS)
        assert parts.calls == (ToolCall("now", {}),)
        assert parts.content and parts.content in text


def test_a_model_that_never_ends_a_call_is_not_read_for_ever() -> None:
    broken = '<tool_call>{"arguments": {"a": "'
    call = f"<tool_call>{NOW}</tool_call>"
    text = f"{broken}{'x' * (REREAD_CHARS_MAX // 4)}" * 5
    splitter = reader("qwen3").splitter(False, TOOLS)
    streamed(splitter, [text + call], is_complete=True)
    assert splitter.parts == AnswerParts("", text.replace("<tool_call>", "") + NOW)
    assert reader("qwen3").read(f"{broken}x{call}", False, TOOLS).calls == (ToolCall("now", {}),)
