"""The form of Gemma 2 and 3: calls in Python, in a fenced block."""

import json
import keyword
import unicodedata
from typing import Any, Final

from hearth.shared import written_numbers
from hearth.worker.formats.shared.format_parts import (
    CallContext,
    CallGrammar,
    Expression,
    Lark,
    Marks,
    ModelFormat,
    ParserSteps,
    Section,
    ToolSchema,
    UnreadableOutput,
    python_call,
    python_calls,
)

START: Final = "```tool_code"
FENCES_MAX: Final = 8  # that are tried as the end of a block


def read(context: CallContext) -> ParserSteps[None]:
    """Read a fenced block of Python that is nothing but calls."""
    texts: list[str] = []
    for _ in range(FENCES_MAX):
        mark = yield from context.buffer.scan(Marks("```"), texts.append)
        if not mark and not context.buffer.is_complete:
            break
        calls = python_calls("".join(texts), context.tools)
        if calls:
            context.buffer.release()
            context.write_all(calls)
            return
        if not mark:
            break
        texts.append(mark)
    raise UnreadableOutput


def write(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.row(f"{START}\n", python_call(lark, tool), "\n```")


def python_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call; arguments whose names are none of Python's stand in `**{}`."""
    named = {key: value for key, value in arguments.items() if _is_name(key)}
    others = {key: value for key, value in arguments.items() if key not in named}
    written = [f"{key}={_python(value)}" for key, value in named.items()]
    shown = [*written, f"**{_python(others)}"] if others else written
    return f"{name}({', '.join(shown)})"


def _is_name(text: str) -> bool:
    """Whether Python takes `text` as an argument's name, and leaves it as it is."""
    is_left = unicodedata.normalize("NFKC", text) == text
    return text.isidentifier() and is_left and not keyword.iskeyword(text)


def _python(value: Any) -> str:
    """Return a value of JSON as a Python literal on one line."""
    # Loops, not comprehensions: one frame a level, as deep as the wire lets JSON be nested.
    parts = []
    if isinstance(value, dict):
        for key, item in value.items():
            parts.append(f"{json.dumps(key, ensure_ascii=False)}: {_python(item)}")
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        for item in value:
            parts.append(_python(item))
        return "[" + ", ".join(parts) + "]"
    is_word = value is None or isinstance(value, bool)
    return repr(value) if is_word else written_numbers.dumps(value)


SECTION = Section(START, read=read, is_own=False)
FORMATS = (
    ModelFormat(
        is_of=lambda words: words.tool_form == "tool_code",
        sections=(SECTION,),
        grammar=CallGrammar(write, START, between="\n"),
    ),
)
