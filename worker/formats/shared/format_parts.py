"""Has all that a module of formats is made of, what it defines, and how a model's is found.

A module of formats imports from here alone.
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
    characters_max,
    is_text,
    words,
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
    "words",
    "written_numbers",
]

# Behind these no other format is looked for: marks that several formats' templates quote.
LAST: Final = 9


@dataclass(frozen=True, slots=True)
class ModelWords:
    """What a model's tokenizer and template have, by which its format is known. Immutable."""

    vocabulary: Set[str]
    template: str
    tool_form: str = "native"  # the form in which its prompts show tools


# Takes what the prompt has begun, and whether calls are read.
AnswerReader = Callable[
    [LookaheadBuffer, AnswerCollector, RequestTools, bool, Channel | None], ParserSteps[None]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat(OutputMarks):
    """The form in which a family of models writes its answers. Immutable.

    `is_of` tells whether a model has it; of several that do, the one of the lowest `rank` counts.
    """

    is_of: Callable[[ModelWords], bool]
    rank: int = 0
    of_words: Callable[[ModelWords], "ModelFormat"] | None = None  # makes it of a model's own marks
    leaves_thinking_open: bool = False  # an answer may begin with a block that nobody opened
    form: TagForm | None = None  # of its calls, where they are elements
    grammar: CallGrammar | None = None  # of a forced call
    analysis: str = ""  # what a prompt ends with that has begun thinking, where no mark ends it
    read: AnswerReader | None = None  # reads the whole answer, where it is a row of messages
    messages: MessageGrammar | None = None  # and what constrains such an answer
    ends: tuple[str, ...] = ()  # tokens that end an answer, and no list may have
    part_ends: tuple[str, ...] = ()  # tokens that end a part of an answer, and not the answer
    # A call of the history by its name and arguments, without what `grammar` has around calls; and
    # what stands around a result. Both where the template does not show them.
    call_text: Callable[[str, Any], str] | None = None
    result: tuple[str, str] | None = None
    tools: Callable[[Sequence[dict[str, Any]]], str] | None = None  # shows functions, likewise


# Kept for a moment: the formats of this program: nothing of a request
@cache
def all_formats() -> tuple[ModelFormat, ...]:
    """Return the formats of all modules of the folder, the most certain first."""
    names = [each.name for each in pkgutil.iter_modules(formats.__path__) if not each.ispkg]
    modules = [importlib.import_module(f"{formats.__name__}.{name}") for name in names]
    found = [each for module in modules for each in module.FORMATS]
    return tuple(sorted(found, key=lambda each: each.rank))


def format_of(words: ModelWords) -> ModelFormat | None:
    """Return the format of a model; None where nothing tells of one."""
    found = next((each for each in all_formats() if each.is_of(words)), None)
    return found.of_words(words) if found and found.of_words else found
