"""Writes grammars of tool calls for each format that mlx-lm has a parser for, and for our own.

They let through what worker/stream parses as calls. Where a format shows no type of a value, it is
bare text if the schema wants a string, otherwise JSON.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.worker.constraint.gemma_call_grammar import FUNCTION_GEMMA, GEMMA4
from hearth.worker.constraint.json_schemas import ToolSchema, characters_max, is_text, words
from hearth.worker.constraint.lark_builder import LENIENT, NEWLINE, NOTHING, Expression, Lark

NUMBER: Final = Expression("/[0-9]{1,2}/")

GrammarWriter = Callable[[Lark, ToolSchema], Expression]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a turn: `start`, calls with `between` among them, `end`. Immutable."""

    call: GrammarWriter
    mark: str  # that a call begins with and other text does not
    start: str = ""
    end: str = ""
    between: str = NEWLINE
    is_single: bool = False  # the format has room for one call

    def expression(self, lark: Lark, tools: Sequence[ToolSchema], is_parallel: bool) -> Expression:
        """Return the calls that a turn may consist of, one at least."""
        assert tools, "a call needs a tool"
        call = lark.any_of([self.call(lark, tool) for tool in tools])
        more = lark.repeated(self.between, call) if is_parallel and not self.is_single else NOTHING
        return lark.row(self.start, call, more, self.end)


# ---------------------------------------------------------------- arguments in one JSON object


def json_arguments(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.json(tool.schema, **LENIENT)


def _json_call(before: str, middle: str, behind: str) -> GrammarWriter:
    def write(lark: Lark, tool: ToolSchema) -> Expression:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        return lark.row(before, lark.quoted(name), middle, json_arguments(lark, tool), behind)

    return write


def _kimi_k2(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.row("<|tool_call_begin|>functions.", lark.quoted(tool.name), ":", NUMBER)
    arguments = json_arguments(lark, tool)
    return lark.row(head, "<|tool_call_argument_begin|>", arguments, "<|tool_call_end|>")


def _kimi_k3(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.row('<|open|>call tool="', lark.quoted(tool.name), '" index="', NUMBER, '"<|sep|>')
    arguments = lark.row('<|open|>json type="object"<|sep|>', json_arguments(lark, tool))
    return lark.row(head, arguments, "<|close|>json<|sep|><|close|>call<|sep|>")


# ---------------------------------------------------------------- arguments one by one, in tags


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around a function's name, and around each parameter's name and value. Immutable."""

    name: tuple[str, str]
    key: tuple[str, ...]  # in front of a parameter's name; the others are behind it
    value_end: str
    end: str
    has_lines: bool = False  # templates end a line behind each parameter
    gap: str = ""  # between a value that is no text and its end


def _tagged(tags: Tags) -> GrammarWriter:
    """Return calls with an element for each parameter, in the schema's order."""

    def write(lark: Lark, tool: ToolSchema) -> Expression:
        elements = []
        for parameter in tool.contained().parameters():
            head = lark.row(tags.key[0], lark.quoted(parameter.name), *tags.key[1:])
            value = _tagged_value(lark, parameter.schema, tags)
            element = lark.rule(lark.row(head, value, lark.line_end if tags.has_lines else NEWLINE))
            elements.append((element, parameter.is_required))
        head = lark.row(tags.name[0], lark.quoted(tool.name), tags.name[1])
        return lark.row(head, lark.elements(elements), tags.end)

    return write


def _tagged_value(lark: Lark, schema: dict[str, Any], tags: Tags) -> Expression:
    """Return a value and the tag that ends it."""
    if not is_text(schema, schema):
        return lark.row(lark.json(schema, **LENIENT), tags.gap, tags.value_end)
    if (choices := words(schema, schema)) is not None:
        return lark.row(lark.any_of(map(lark.quoted, choices)), tags.gap, tags.value_end)
    return lark.text_until(tags.value_end, characters_max(schema, schema))


_QWEN3_CODER: Final = Tags(
    name=("<tool_call>\n<function=", ">\n"),
    key=("<parameter=", ">\n"),
    gap="\n",
    has_lines=True,
    value_end="</parameter>",
    end="</function>\n</tool_call>",
)
_GLM: Final = Tags(
    name=("<tool_call>", NEWLINE),
    key=("<arg_key>", "</arg_key>", NEWLINE, "<arg_value>"),
    value_end="</arg_value>",
    end="</tool_call>",
)
_LONGCAT: Final = Tags(
    name=("<longcat_tool_call>", NEWLINE),
    key=("<longcat_arg_key>", "</longcat_arg_key>", NEWLINE, "<longcat_arg_value>"),
    value_end="</longcat_arg_value>",
    end="</longcat_tool_call>",
)
_MINIMAX: Final = Tags(
    name=('<invoke name="', '">\n'),
    key=('<parameter name="', '">'),
    value_end="</parameter>",
    end="</invoke>",
)
_MINICPM: Final = Tags(
    name=('<function name="', '">'),
    key=('<param name="', '">'),
    value_end="</param>",
    end="</function>",
)
_MUSE: Final = Tags(
    name=('<atem:invoke name="', '">\n'),
    key=('<atem:parameter name="', '">'),
    value_end="</atem:parameter>",
    end="</atem:invoke>",
)


# ---------------------------------------------------------------- arguments as in Python


def _python(lark: Lark, tool: ToolSchema) -> Expression:
    """Return a call with keyword arguments. JSON's strings and numbers are Python's too."""
    items = [
        (
            lark.row(parameter.name, "=", lark.json(parameter.schema, **LENIENT)),
            parameter.is_required,
        )
        for parameter in tool.contained().parameters()
        if parameter.name.isidentifier()
    ]
    return lark.row(lark.quoted(tool.name), "(", lark.separated(items, ", "), ")")


def _tool_code(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.row("```tool_code\n", _python(lark, tool), "\n```")


# ---------------------------------------------------------------- which format

_JSON_TOOLS: Final = CallGrammar(
    _json_call('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "<tool_call>"
)
_BARE_JSON: Final = CallGrammar(
    _json_call('{"name": "', '", "parameters": ', "}"), '{"name": "', is_single=True
)
_MISTRAL_HEADS: Final = CallGrammar(
    _json_call("[TOOL_CALLS]", "[ARGS]", ""), "[TOOL_CALLS]", between=""
)
_BY_FORM: Final = {
    "manual": _JSON_TOOLS,
    "tool_code": CallGrammar(_tool_code, "```tool_code", between="\n"),
}
_BY_PARSER: Final = {
    "json_tools": _JSON_TOOLS,
    "qwen3_coder": CallGrammar(_tagged(_QWEN3_CODER), "<tool_call>"),
    "glm47": CallGrammar(_tagged(_GLM), "<tool_call>"),
    "longcat": CallGrammar(_tagged(_LONGCAT), "<longcat_tool_call>"),
    "minimax_m2": CallGrammar(
        _tagged(_MINIMAX),
        "<minimax:tool_call>",
        start="<minimax:tool_call>\n",
        end="\n</minimax:tool_call>",
    ),
    "minicpm5": CallGrammar(_tagged(_MINICPM), "<function name="),
    "muse_spark": CallGrammar(
        _tagged(_MUSE),
        "<atem:function_calls>",
        start="<atem:function_calls>\n",
        end="\n</atem:function_calls>",
    ),
    "mistral": CallGrammar(
        _json_call('{"name": "', '", "arguments": ', "}"),
        "[TOOL_CALLS]",
        start="[TOOL_CALLS][",
        end="]",
        between=", ",
    ),
    "kimi_k2": CallGrammar(
        _kimi_k2,
        "<|tool_calls_section_begin|>",
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        between="",
    ),
    "kimi_k3": CallGrammar(
        _kimi_k3,
        "<|open|>tools<|sep|>",
        start="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        between="",
    ),
    "function_gemma": CallGrammar(FUNCTION_GEMMA, "<start_function_call>"),
    "gemma4": CallGrammar(GEMMA4, "<|tool_call>"),
    "pythonic": CallGrammar(
        _python,
        "<|tool_call_start|>",
        start="<|tool_call_start|>[",
        end="]<|tool_call_end|>",
        between=", ",
    ),
}


def call_grammar(tokenizer: Any, tool_form: str) -> CallGrammar | None:
    """Return the grammar in which the model of mlx-lm's `tokenizer` calls; None without one.

    `tool_form`: "native" where its template shows tools, else the form in which the prompt does.
    """
    if tool_form != "native":
        return _BY_FORM.get(tool_form)
    if tokenizer.tool_parser is None:
        return _BARE_JSON
    parser = tokenizer.tool_parser.__module__.rpartition(".")[2]
    if parser == "mistral" and "[ARGS]" in tokenizer.get_vocab():
        return _MISTRAL_HEADS
    return _BY_PARSER.get(parser)
