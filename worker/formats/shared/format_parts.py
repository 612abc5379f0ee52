"""Defines the type of a format, finds a model's format, and exports all that formats are made of.

The modules of formats import from here alone.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from hearth.shared import written_numbers
from hearth.worker import formats
from hearth.worker.constraint.call_grammars import (
    NOTHING,
    NUMBER,
    TEXT,
    BareKeys,
    CallGrammar,
    Expression,
    Lark,
    MessageGrammar,
    json_arguments,
    json_call,
    json_call_text,
    message_grammar,
    python_call,
    tagged,
)
from hearth.worker.constraint.json_schemas import (
    Parameter,
    ToolSchema,
    allowed_strings,
    characters_max,
    is_text,
)
from hearth.worker.stream.answer_parts import AnswerCollector, Channel
from hearth.worker.stream.lookahead_buffer import (
    LookaheadBuffer,
    Marks,
    ParserSteps,
    UnreadableOutput,
    WriteText,
)
from hearth.worker.stream.reasoning_and_tool_parser import OutputMarks
from hearth.worker.stream.tool_calls.call_parser import (
    BLANKS,
    marked_calls,
    python_calls,
    read_section,
)
from hearth.worker.stream.tool_calls.json_calls import (
    CallContext,
    CallWriter,
    Section,
    Trust,
    json_calls,
    named_call,
)
from hearth.worker.stream.tool_calls.lenient_json import Transcoder, json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm, bare_form, tag_form

__all__ = [
    "BLANKS",
    "LAST",
    "NOTHING",
    "NUMBER",
    "TEXT",
    "AnswerCollector",
    "BareKeys",
    "CallContext",
    "CallGrammar",
    "CallWriter",
    "Channel",
    "Expression",
    "Lark",
    "LookaheadBuffer",
    "Marks",
    "MessageGrammar",
    "ModelFormat",
    "ModelWords",
    "Parameter",
    "ParserSteps",
    "RequestTools",
    "Section",
    "TagForm",
    "ToolSchema",
    "Transcoder",
    "Trust",
    "UnreadableOutput",
    "WriteText",
    "allowed_strings",
    "bare_form",
    "characters_max",
    "is_text",
    "json_arguments",
    "json_call",
    "json_call_text",
    "json_calls",
    "json_text",
    "marked_calls",
    "message_grammar",
    "named_call",
    "python_call",
    "python_calls",
    "read_section",
    "tag_form",
    "tagged",
    "written_numbers",
]

# Templates of other formats may quote the marks of these formats, so these are tried last.
LAST: Final = 9


@dataclass(frozen=True, slots=True)
class ModelWords:
    """The properties of a model's tokenizer and template that tell its format. Immutable."""

    vocabulary: Set[str]
    template: str
    tool_form: str = "native"  # the form in which its prompts show tools


# Takes buffer, collector, tools, whether calls are read, and the channel that the prompt began.
AnswerReader = Callable[
    [LookaheadBuffer, AnswerCollector, RequestTools, bool, Channel | None], ParserSteps[None]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat(OutputMarks):
    """The form in which a family of models writes its answers. Immutable.

    `matches` tells whether a model has this format. Of several matching formats, the one with the
    lowest `rank` counts.
    """

    matches: Callable[[ModelWords], bool]
    rank: int = 0
    for_model: Callable[[ModelWords], "ModelFormat"] | None = None  # fills in a model's own marks
    leaves_thinking_open: bool = False  # thinking may begin without its opening mark
    form: TagForm | None = None  # form of calls that are written as XML elements
    grammar: CallGrammar | None = None  # grammar of a forced call
    analysis: str = ""  # end of prompts that open a message of thinking
    read: AnswerReader | None = None  # reader of a whole answer that is a sequence of messages
    messages: MessageGrammar | None = None  # grammar of an answer of messages
    ends: tuple[str, ...] = ()  # tokens that end an answer, though the model may not list them
    part_ends: tuple[str, ...] = ()  # tokens that end a part of an answer, but not the answer
    # For templates that do not show calls, results or tools:
    call_text: Callable[[str, Any], str] | None = None  # writes one call, without text around it
    result: tuple[str, str] | None = None  # texts around a result
    tools: Callable[[Sequence[dict[str, Any]]], str] | None = None  # writes the tools


# Kept for a moment: the formats of this program, nothing of a request
@cache
def all_formats() -> tuple[ModelFormat, ...]:
    """Return the formats of all modules of the folder, the lowest rank first."""
    names = [info.name for info in pkgutil.iter_modules(formats.__path__) if not info.ispkg]
    modules = [importlib.import_module(f"{formats.__name__}.{name}") for name in names]
    found = [model_format for module in modules for model_format in module.FORMATS]
    return tuple(sorted(found, key=lambda model_format: model_format.rank))


def format_of(words: ModelWords) -> ModelFormat | None:
    """Return the format of a model; None if no format matches."""
    found = next((candidate for candidate in all_formats() if candidate.matches(words)), None)
    return found.for_model(words) if found and found.for_model else found
