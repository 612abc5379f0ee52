"""Checks odd outputs across formats: halves of characters, endless thinking, names of tools."""

import re

import pytest

from hearth.worker.stream.answer_parts import ToolCall
from hearth.worker.stream.tool_calls.python_calls import python_calls
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from scripts.harness.model_families import family


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
    assert splitter.parts.calls == (ToolCall("run", {"cmd": f"a{meant}b"}),)
    "".join(part.text + part.name for part in parts).encode()


def test_an_answer_of_glm_without_an_end_of_thinking_is_content_but_not_one_cut_off() -> None:
    reader = family("glm4").reader
    for is_complete, content in ((True, "The answer."), (False, "")):
        splitter = reader.splitter(False, [], may_think=True)
        splitter.feed("The answer.")
        splitter.finish(is_complete=is_complete)
        assert splitter.parts.content == content


def test_no_pattern_is_made_of_a_tools_name_for_python_remembers_patterns() -> None:
    name = "cAnArY.77-31"
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    calls = python_calls(f"[{name}(), {name} ()]", RequestTools(tools))
    assert [call.name for call in calls] == [name, name]
    remembered = [str(key) for key in re._cache]  # type: ignore[attr-defined]
    assert not [key for key in remembered if "cAnArY" in key]
