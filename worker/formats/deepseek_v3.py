"""The formats of DeepSeek V3, R1 and V3.1: a name and JSON, with marks around each call."""

from collections.abc import Sequence
from typing import Any, Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
    json_call_text,
    marked_calls,
    written_numbers,
)

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, BEHIND_NAME = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD: Final = regex.compile(
    r"(?:function<｜tool▁sep｜>)?+(?P<name>[^\s<>{}｜]++)\s*+(?:<｜tool▁sep｜>)?+\s*+"
    r"(?:```(?:json)?+\s*+)?+(?=\{)"
)
_READ: Final = marked_calls(CALL, _HEAD, CALL_END, END)
_SECTIONS: Final = (Section(START, read=_READ), Section(CALL, read=_READ))
_FENCED: Final = (f"{CALL}function{BEHIND_NAME}", "\n```json\n", f"\n```{CALL_END}")
_RULES: Final = f"""\
IMPORTANT: ALWAYS adhere to this exact format for tool use:
{START}{CALL}tool_call_name{BEHIND_NAME}tool_call_arguments{CALL_END}{{additional_tool_calls}}{END}

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""
RESULT, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


def _tools(functions: Sequence[dict[str, Any]]) -> str:
    """Return the text that shows V3.1 its tools, as the model card does."""
    shown = [
        f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {written_numbers.dumps(function.get('parameters') or {})}"
        for function in functions
    ]
    return "\n\n".join(["## Tools\nYou have access to the following tools:", *shown, _RULES])


FORMATS = (
    ModelFormat(
        matches=lambda words: START in words.template and "```json" in words.template,
        sections=_SECTIONS,
        grammar=CallGrammar(
            json_call(*_FENCED),
            START,
            start=START,
            end=END,
            between="\n",
        ),
        call_text=json_call_text(*_FENCED),
        result=(f"<｜tool▁outputs▁begin｜>{RESULT}", f"{RESULT_END}<｜tool▁outputs▁end｜>"),
    ),
    ModelFormat(
        matches=lambda words: START in words.template,
        rank=1,
        sections=_SECTIONS,
        grammar=CallGrammar(
            json_call(CALL, BEHIND_NAME, CALL_END), START, start=START, end=END, between=""
        ),
        call_text=json_call_text(CALL, BEHIND_NAME, CALL_END),
        result=(RESULT, RESULT_END),
        tools=_tools,
    ),
)
