"""Outputs of every format, read whole: each against what it is known to say. And the limits."""

import json
import re

import pytest

from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.lookahead_buffer import TRIM_CHARS
from hearth.worker.stream.reasoning_and_tool_parser import REREAD_CHARS_MAX
from hearth.worker.stream.tool_calls.call_parser import python_calls
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from scripts.harness.model_families import family
from tests.helpers.worker.output_formats import (
    OUTPUTS,
    joined,
    outputs,
    read_whole,
    reader,
    streamed,
    tool,
)

FILES = sorted(path.stem for path in OUTPUTS.glob("*.jsonl"))
NOW = '{"name": "now", "arguments": {}}'
TOOLS = [tool(("now", {}))]


@pytest.mark.parametrize("name", FILES)
def test_an_output_says_what_it_is_known_to_say(name: str) -> None:
    for output in outputs(name):
        splitter = output.splitter()
        joined(streamed(splitter, [output.text], output.is_complete))
        assert splitter.collector.parts == output.parts, output.text
        assert repr(splitter.collector.parts) == repr(output.parts), "true is not 1"


def test_what_was_read_long_ago_is_let_go_but_not_what_stands_beside_a_mark() -> None:
    text = "x" * TRIM_CHARS + "`</think>` `<think>`"
    splitter = reader("qwen3").splitter(False, TOOLS)
    streamed(splitter, text, is_complete=True)
    assert splitter.collector.parts == AnswerParts("", text)


@pytest.mark.parametrize("piece_chars", [1, 3, 7, 40])
def test_a_long_call_of_many_values_loses_none_where_read_text_is_let_go(piece_chars: int) -> None:
    arguments = {"edits": [{"line": number} for number in range(TRIM_CHARS // 2)], "count": 3}
    text = f"<tool_call>\n{json.dumps({'name': 'edit', 'arguments': arguments})}\n</tool_call>"
    tools = [tool(("edit", {"edits": "array", "count": "integer"}))]
    splitter = reader("qwen3").splitter(False, tools)
    cuts = range(0, len(text), piece_chars)
    streamed(splitter, [text[at : at + piece_chars] for at in cuts], is_complete=True)
    assert splitter.collector.parts == AnswerParts("", "", (ToolCall("edit", arguments),))


def test_of_several_calls_those_before_a_broken_one_count() -> None:
    for format, text in (
        ("qwen3", f'<tool_call>{NOW}\n{{"bad": 1}}</tool_call>'),
        ("mistral", f'[TOOL_CALLS][{NOW}, {{"bad": 1}}]'),
        ("minimax_m2", f"<minimax:tool_call>{NOW}<b></minimax:tool_call>"),
    ):
        parts = read_whole(reader(format), text, False, TOOLS)
        assert parts.calls == (ToolCall("now", {}),)
        assert parts.content and parts.content in text


def test_a_model_that_never_ends_a_call_is_not_read_for_ever() -> None:
    broken = '<tool_call>{"arguments": {"a": "'
    call = f"<tool_call>{NOW}</tool_call>"
    text = f"{broken}{'x' * (REREAD_CHARS_MAX // 4)}" * 5
    splitter = reader("qwen3").splitter(False, TOOLS)
    streamed(splitter, [text + call], is_complete=True)
    assert splitter.collector.parts == AnswerParts("", text.replace("<tool_call>", "") + NOW)
    assert read_whole(reader("qwen3"), f"{broken}x{call}", False, TOOLS).calls == (
        ToolCall("now", {}),
    )


# ---------------------------------------------------------------- odd outputs


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d", "\ufffd"),
        (r"\ude00", "\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\ud83dx", "\ufffdx"),
        (r"[\ud800-\udbff]", "[\ufffd-\ufffd]"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_half_a_character_never_leaves_a_call(written: str, meant: str, size: int) -> None:
    text = f'<tool_call>\n{{"name": "run", "arguments": {{"cmd": "a{written}b"}}}}\n</tool_call>'
    splitter = family("qwen3").reader.splitter(False, [])
    parts = [
        part for at in range(0, len(text), size) for part in splitter.feed(text[at : at + size])
    ]
    parts += splitter.finish(is_complete=True)
    assert splitter.collector.parts.calls == (ToolCall("run", {"cmd": f"a{meant}b"}),)
    "".join(part.text + part.name for part in parts).encode()


def test_an_answer_of_glm_without_an_end_of_thinking_is_content_but_not_one_cut_off() -> None:
    reader = family("glm4").reader
    for is_complete, content in ((True, "The answer."), (False, "")):
        splitter = reader.splitter(False, [], may_think=True)
        splitter.feed("The answer.")
        splitter.finish(is_complete=is_complete)
        assert splitter.collector.parts.content == content


def test_no_pattern_is_made_of_a_tools_name_for_python_remembers_patterns() -> None:
    name = "cAnArY.77-31"
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    calls = python_calls(f"[{name}(), {name} ()]", RequestTools(tools))
    assert [called for called, _ in calls] == [name, name]
    remembered = [str(key) for key in re._cache]  # type: ignore[attr-defined]
    assert not [key for key in remembered if "cAnArY" in key]
