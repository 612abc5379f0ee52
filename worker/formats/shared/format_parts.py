"""Has all that a module of formats is made of, so that it imports from one place."""

from hearth.shared import (
    written_numbers,
)
from hearth.worker.constraint.call_grammars import (
    NUMBER,
    BareKeys,
    CallGrammar,
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
from hearth.worker.constraint.lark_builder import (
    NOTHING,
    TEXT,
    Expression,
    Lark,
)
from hearth.worker.formats.shared.model_format import (
    LAST,
    ModelFormat,
    ModelWords,
)
from hearth.worker.stream.answer_parts import (
    AnswerCollector,
    Channel,
)
from hearth.worker.stream.lookahead_buffer import (
    LookaheadBuffer,
    Marks,
    ParserSteps,
    UnreadableOutput,
    WriteText,
)
from hearth.worker.stream.tool_calls.call_parser import (
    BLANKS,
    Section,
    marked_calls,
)
from hearth.worker.stream.tool_calls.json_calls import (
    CallContext,
    CallWriter,
    Trust,
    json_calls,
    named_call,
)
from hearth.worker.stream.tool_calls.lenient_json import (
    Transcoder,
    json_text,
)
from hearth.worker.stream.tool_calls.python_calls import (
    python_calls,
)
from hearth.worker.stream.tool_calls.request_tools import (
    RequestTools,
)
from hearth.worker.stream.tool_calls.tag_form import (
    TagForm,
    bare_form,
    tag_form,
)

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
    "tag_form",
    "tagged",
    "words",
    "written_numbers",
]
