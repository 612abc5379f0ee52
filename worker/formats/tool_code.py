"""The format of Gemma 2 and 3: calls in Python, in a fenced block."""

from typing import Final

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
FENCES_MAX: Final = 8  # fences that are tried as the end of a block


def read(context: CallContext) -> ParserSteps[None]:
    """Read a fenced block of Python that consists of calls."""
    texts: list[str] = []
    for _ in range(FENCES_MAX):
        mark = yield from context.buffer.scan(Marks("```"), texts.append)
        if not mark and not context.buffer.is_complete:
            break
        calls = python_calls("".join(texts), context.tools)
        if calls:
            for call in calls:
                context.write(*call)
            return
        if not mark:
            break
        texts.append(mark)
    raise UnreadableOutput


def write(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.concat(f"{START}\n", python_call(lark, tool), "\n```")


SECTION = Section(START, read=read, takes_any_name=False)
FORMATS = (
    ModelFormat(
        matches=lambda words: words.tool_form == "tool_code",
        sections=(SECTION,),
        grammar=CallGrammar(write, START, between="\n"),
    ),
)
