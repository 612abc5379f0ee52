"""Holds example outputs of each model format, and a stand-in for the format's tokenizer."""

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hearth.worker.formats.shared.format_parts import ModelFormat
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.stream.answer_parts import AnswerPart, AnswerParts, AnswerSplitter, ToolCall
from scripts.harness.model_families import FAMILIES, family

OUTPUTS = Path(__file__).parents[2] / "data" / "outputs"


@dataclass(frozen=True)
class StandIn:
    """What PartsReader asks of mlx-lm's TokenizerWrapper."""

    vocabulary: tuple[str, ...] = ()
    think_start: str | None = None
    think_end: str | None = None
    chat_template: str = ""

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.vocabulary)}


_THINK = ("<think>", "</think>")
STAND_INS = {
    "minimax_m2": StandIn(_THINK, *_THINK, chat_template="<minimax:tool_call>"),
    "gemma4": StandIn(
        (), "<|channel>thought", "<channel|>", chat_template="<|tool_call><tool_call|>"
    ),
    "function_gemma": StandIn(chat_template="<start_function_call>"),
    "longcat": StandIn(
        (), "<longcat_think>", "</longcat_think>", chat_template="<longcat_tool_call>"
    ),
    "pythonic": StandIn(chat_template="<|tool_call_start|>"),
    "kimi_k2": StandIn(_THINK, *_THINK, chat_template="<|tool_calls_section_begin|>"),
    "kimi_k3": StandIn(
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
    ),
    "minicpm5": StandIn(_THINK, *_THINK, chat_template='<function name="<param name="'),
    "muse_spark": StandIn(chat_template="<atem:function_calls>"),
    "laguna": StandIn(_THINK, *_THINK, chat_template="<arg_key>"),
    "magistral": StandIn(("[THINK]", "[/THINK]"), chat_template="[TOOL_CALLS]"),
    "cohere": StandIn(
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        chat_template="<|START_ACTION|>",
    ),
    "minimax_m3": StandIn(("<mm:think>", "</mm:think>"), chat_template="]<]minimax[>[<tool_call>"),
}
FORMATS = (*FAMILIES, *STAND_INS)


@cache
def reader(name: str) -> OutputFormat:
    """Return what takes apart the outputs of a format."""
    return family(name).reader if name in FAMILIES else OutputFormat(STAND_INS[name])


def read_whole(form: OutputFormat, text: str, is_thinking: bool, tools: list[Any]) -> AnswerParts:
    """Return the parts of a complete generated text, without its end-of-turn token."""
    splitter = form.splitter(is_thinking, tools)
    splitter.feed(text)
    splitter.finish(is_complete=True)
    return splitter.collector.parts


@cache
def marks_of(each: ModelFormat) -> set[str]:
    """Return the marks that a format's calls and thinking are made of."""
    found = [mark for section in each.sections for mark in (section.start, section.end)]
    found += [section.quote for section in each.sections]
    if form := each.form:
        found += [form.value_end, form.call_end, form.begins, *form.name, *form.key]
    if each.grammar:
        found += [each.grammar.start, each.grammar.end, each.grammar.mark]
    if each.messages:
        found += ["<|call|>", "<|return|>", *re.findall(r"<.*?>", each.messages.thinking_close)]
    return {mark.strip() for mark in (*found, *each.thinking) if len(mark.strip()) > 2}


@dataclass(frozen=True)
class Output:
    """One output of a model, and what is expected of it."""

    format: str
    text: str
    parts: AnswerParts
    tools: list[Any]
    is_thinking: bool = False
    is_complete: bool = True
    may_think: bool = False

    def splitter(self) -> AnswerSplitter:
        return reader(self.format).splitter(self.is_thinking, self.tools, may_think=self.may_think)


def outputs(name: str) -> Iterator[Output]:
    """Yield the outputs in a file of tests/data/outputs.

    A line is {format, text, reasoning, content, calls: [[name, arguments]], tools: {name:
    {argument: type}}} and the flags of Output, defaults left out. A line that has only tools
    gives them to those behind it.
    """
    tools: dict[str, Any] = {}
    for line in (OUTPUTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        tools = row.pop("tools", tools)
        if row:
            calls = tuple(ToolCall(*call) for call in row.pop("calls", []))
            parts = AnswerParts(row.pop("reasoning", ""), row.pop("content", ""), calls)
            yield Output(parts=parts, tools=[*map(tool, tools.items())], **row)


def tool(row: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a tool in OpenAI's shape; its arguments' types are names, or schemas."""
    name, types = row
    properties = {
        key: {"type": kind} if isinstance(kind, str) else kind for key, kind in types.items()
    }
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Pieces:
    """Token n stands for the n-th of these texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def add(self, token_id: int) -> str:
        return self._texts[token_id]


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Return what all parts say together: neighbours of one kind are one part."""
    found: list[AnswerPart] = []
    for part in parts:
        assert part.text or part.name, "a part says something"
        assert part.channel == "tool_call" or not part.name
        if found and found[-1].channel == part.channel and not part.name:
            last = found.pop()
            part = AnswerPart(last.channel, last.text + part.text, last.name)
        assert part.channel != "tool_call" or part.name, "a call begins with its name"
        found.append(part)
    return found


def pieces(text: str, chance: random.Random) -> Iterator[str]:
    """Yield `text` cut at random: in single characters, tokens or long stretches."""
    size = chance.choice([1, 2, 4, 12, 60])
    while text:
        count = chance.randint(1, size)
        yield text[:count]
        text = text[count:]


def streamed(splitter: AnswerSplitter, texts: Iterable[str], is_complete: bool) -> list[AnswerPart]:
    """Return the parts of texts that come one by one."""
    parts: list[AnswerPart] = []
    for text in texts:
        parts += splitter.feed(text)
    return parts + splitter.finish(is_complete)


MARKS = sorted({mark for each in FAMILIES.values() for mark in (*each.controls, *each.marks)})

PIECES = [
    *MARKS,
    *('{"name": "f", "arguments": {', '"a": ', "}}", "{", "}", "[", "]", '"', "\\", ",", "null"),
    *("<function=f>\n", "</function>", "<parameter=a>\n", "\n</parameter>\n", "[ARGS]", "f", "é"),
    *("to=functions.f", "to=", "analysis", "final", "commentary", " ", "\n", "\n\n", "x = 1"),
    *("\\ud800", "\x00", "1e999", "-", "NaN", "b'x'", "(1, {2})"),
]
