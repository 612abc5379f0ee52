"""Builds grammars of tool calls, of whatever form they are in, in llguidance's dialect of Lark.

They let through what worker/stream parses as calls. Where a format shows no type of a value, it is
bare text if the schema wants a string, otherwise JSON.
Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hearth.shared import written_numbers
from hearth.shared.errors import RequestError
from hearth.worker.constraint.json_schemas import (
    Parameter,
    ToolSchema,
    characters_max,
    is_text,
    resolved,
    whole,
    words,
)
from hearth.worker.stream.tool_calls.tag_form import MAY_BREAK, TagForm

# A blank behind a separator is what templates write; more of it has a weak model write blanks
# until its answer is cut off.
JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
RULES_MAX: Final = 10_000
GRAMMAR_CHARS_MAX: Final = 2_000_000  # of all schemas in it together
LENIENT: Final = {"lenient": True}  # keywords that llguidance does not know are left unenforced


class Expression(str):
    """A piece of Lark source. In a row with such pieces any other string is literal text."""


NOTHING: Final = Expression('""')
TEXT: Final = Expression("TEXT")  # at least one character, and no mark
NEWLINES: Final = Expression("(NEWLINES)?")  # at most three: ERNIE writes those
NEWLINE: Final = Expression('("\\n")?')  # at most one
_HEAD: Final = "%llguidance {}\nTEXT: /(?s:.+)/\nNEWLINES: /\\n{1,3}/\n"


class Lark:
    """One grammar in the making. Owner: the prompt thread.

    Invariants: a mark is a token that no other text is made of; literal text that quotes it stands
    for that token, and free text never holds it. At most RULES_MAX rules.
    """

    line_end: Expression = NEWLINE  # behind what templates end a line with

    def __init__(self, marks: Mapping[str, int]) -> None:
        assert "" not in marks, "an empty mark would split every text"
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        # A newline stands alone: llguidance's lexer never goes back from a literal that begins with
        # one to the newline alone.
        self._split = re.compile("(" + "|".join(map(re.escape, [*longest_first, "\n"])) + ")")
        self._rules: list[str] = []
        self._chars = 0  # of their bodies

    def row(self, *parts: str) -> Expression:
        """Return the parts one behind the other; strings that are no expression are literal."""
        found = [part if isinstance(part, Expression) else self._literal(part) for part in parts]
        return Expression(" ".join(part for part in found if part != NOTHING) or NOTHING)

    @staticmethod
    def quoted(text: str) -> Expression:
        """Return a client's text: no mark, whatever it spells out."""
        return Expression(json.dumps(text))

    def any_of(self, choices: Iterable[str]) -> Expression:
        """Return that one of the choices stands here."""
        return self.rule(" | ".join(self.row(choice) for choice in choices))

    def optional(self, *parts: str) -> Expression:
        return Expression(f"({self.row(*parts)})?")

    def repeated(self, *parts: str) -> Expression:
        """Return that the row stands here any number of times."""
        return Expression(f"({self.row(*parts)})*")

    def text_until(self, end: str, characters_max: int | None = None, but: str = "") -> Expression:
        """Return free text, maybe none, without the characters `but`, and the `end` behind it."""
        assert end and (characters_max is None or characters_max >= 0), (end, characters_max)
        # Lark's expressions stand on one line.
        character = "[^{}]".format(re.escape(but).replace("\n", "n")) if but else "(?s:.)"
        text = f"{character}{'*' if characters_max is None else f'{{0,{characters_max}}}'}"
        before, mark, *_ = (*self._split.split(end, maxsplit=1), "")
        if mark:  # what stands in front of the mark ends the text
            before = re.escape(before).replace("/", r"\/")
            return self.row(self.rule(f"/{text}{before}/"), end[end.index(mark) :])
        return self.rule(f"/{text}/", f"[suffix={json.dumps(end)}]")

    def json(self, schema: Mapping[str, Any], **options: Any) -> Expression:
        """Return a JSON value of this schema, a document of its own."""
        document = {**schema, "x-guidance": {**JSON_OPTIONS, **options}}
        return self.rule(f"%json {json.dumps(document)}")

    def elements(self, items: Sequence[tuple[str, bool]]) -> Expression:
        """Return items (expression, is required) in their order, one behind the other."""
        return self.row(*(item if needed else self.optional(item) for item, needed in items))

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> Expression:
        """Return items (expression, is required) in their order, a separator between each two."""
        first, later = NOTHING, NOTHING  # from here on, where none stands in front, or one does
        for item, is_required in reversed(items):
            with_first, with_later = self.row(item, later), self.row(separator, item, later)
            first = self.rule(with_first if is_required else f"{with_first} | {first}")
            later = self.rule(with_later if is_required else f"{with_later} | {later}")
        return first

    def rule(self, body: str, options: str = "") -> Expression:
        """Give a rule a name, which stands for it."""
        if len(self._rules) >= RULES_MAX:
            raise RequestError(
                f"The grammar of what is asked for has over {RULES_MAX:,} rules. Use fewer tools, "
                "or schemas that refer to themselves less.",
                code="invalid_grammar",
            )
        self._chars += len(body)
        if self._chars > GRAMMAR_CHARS_MAX:
            raise RequestError(
                "The grammar of the tools that may be called is too long: the limit for all their "
                f"JSON schemas together is {GRAMMAR_CHARS_MAX:,} characters. Use fewer tools.",
                code="invalid_grammar",
                param="tools",
            )
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}\n")
        return Expression(name)

    def source(self, start: Expression) -> str:
        """Return the grammar of what `start` says."""
        return f"{_HEAD}start: {start}\n{''.join(self._rules)}"

    def _literal(self, text: str) -> Expression:
        found = (
            f"<[{self._marks[piece]}]>"
            if piece in self._marks
            else json.dumps(piece, ensure_ascii=False)
            for piece in self._split.split(text)
            if piece
        )
        return Expression(" ".join(found) or NOTHING)


# ---------------------------------------------------------------- calls

NUMBER: Final = Expression("/[0-9]{1,2}/")

DEPTH_MAX: Final = 8  # of values in values
SCALAR: Final = {"type": ["number", "boolean", "null"]}

GrammarWriter = Callable[[Lark, ToolSchema], Expression]
CallsWriter = Callable[[Lark, Sequence[ToolSchema], bool], Expression]  # whether several may stand


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a turn: `start`, calls with `between` among them, `end`. Immutable.

    The last line may be ended.
    """

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
        return lark.row(self.start, call, more, self.end, NEWLINE)

    def text(self, calls: Iterable[str]) -> str:
        """Return such calls as a turn has them."""
        between = "\n" if isinstance(self.between, Expression) else self.between
        return f"{self.start}{between.join(calls)}{self.end}"


@dataclass(frozen=True, slots=True)
class MessageGrammar:
    """The grammar of an answer that is a row of messages. Immutable."""

    mark: str  # that a call begins with and other text does not
    thinking: str  # begins a message of thinking
    thinking_end: str
    thinking_close: str  # what is written where thinking has to end
    again: str  # what begins thinking right behind `thinking_close`
    final_message: Callable[[Lark, Expression], Expression]  # whose text is that
    call_message: CallsWriter
    addressed_call: CallsWriter  # from `mark` on
    turn: Callable[[Lark, Expression, str], Expression]  # that ends so, behind an opening


def message_grammar(
    calls: CallGrammar,
    thinking: tuple[str, str, str],
    behind: str,
    final: tuple[str, str],
    opens: str = "",
    skipped: str = "",
    to: tuple[str, str] | None = None,
) -> MessageGrammar:
    """Return the grammar of messages of thinking, and of text or calls behind them.

    `thinking` begins such a message, in two pieces of which the second tells what it is, and ends
    it; `behind` stands behind it. `final` is around the answer's text, `skipped` in front of calls.
    `opens` is in front of both, unless the prompt ends with it. `to` is around the tool's name in
    front of each call, where one stands there.
    """
    front, kind, end = thinking

    def addressed(lark: Lark, tool: ToolSchema) -> Expression:
        name = (to[0], lark.quoted(tool.name), to[1]) if to else ()
        return lark.row(*name, calls.call(lark, tool))

    def turn(lark: Lark, last: Expression, opening: str) -> Expression:
        text = lark.row(lark.optional(TEXT), end, behind)
        begun = text if opening.endswith(f"{front}{kind}") else NOTHING
        head = "" if opening.endswith(opens) else opens
        return lark.row(begun, lark.repeated(front, kind, text), head, last)

    written = replace(calls, call=addressed)
    return MessageGrammar(
        mark=calls.mark,
        thinking=f"{front}{kind}",
        thinking_end=end,
        thinking_close=f"{end}{behind}{front}",
        again=kind,
        final_message=lambda lark, answer: lark.row(final[0], answer, final[1]),
        call_message=lambda lark, tools, several: lark.row(
            skipped, written.expression(lark, tools, several)
        ),
        addressed_call=lambda lark, tools, several: calls.expression(
            lark, tools, several and to is None
        ),
        turn=turn,
    )


def json_arguments(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.json(tool.schema, **LENIENT)


def json_call(before: str, middle: str, behind: str) -> GrammarWriter:
    """Return calls with the arguments in one JSON object behind the name."""

    def write(lark: Lark, tool: ToolSchema) -> Expression:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        return lark.row(before, lark.quoted(name), middle, json_arguments(lark, tool), behind)

    return write


def json_call_text(before: str, middle: str, behind: str) -> Callable[[str, Any], str]:
    """Return what writes a call of the history so."""

    def text(name: str, arguments: Any) -> str:
        name, written = map(written_numbers.dumps, (name, arguments))
        return f"{before}{name[1:-1]}{middle}{written}{behind}"

    return text


def tagged(form: TagForm) -> GrammarWriter:
    """Return calls with an element for each parameter, in the schema's order."""

    def write(lark: Lark, tool: ToolSchema) -> Expression:
        head = lark.row(form.name[0], lark.quoted(tool.name), *map(_literal, form.name[1:]))
        return lark.row(head, _elements(lark, tool.contained(), form), form.call_end, form.behind)

    return write


def _literal(text: str) -> str:
    return NEWLINE if text == MAY_BREAK else text


def _elements(lark: Lark, tool: ToolSchema, form: TagForm) -> Expression:
    """Return an element for each parameter; each part of the schema is complete in itself."""
    elements = []
    line_end = lark.line_end if form.has_lines else NEWLINE
    for parameter in tool.parameters():
        head = lark.row(form.key[0], lark.quoted(parameter.name), *map(_literal, form.key[1:]))
        if form.typed:
            is_json = not is_text(parameter.schema, parameter.schema)
            head = lark.row(head, lark.any_of(form.typed[1:] if is_json else form.typed[:1]))
        value = _tagged_value(lark, parameter, form)
        elements.append((lark.rule(lark.row(head, value, line_end)), parameter.is_required))
    return lark.elements(elements)


def _tagged_value(lark: Lark, parameter: Parameter, form: TagForm) -> Expression:
    """Return a value and the tag that ends it."""
    schema, end = parameter.schema, form.value_end.format(parameter.name)
    if form.unfold and isinstance(schema.get("items"), dict):
        items = {"properties": {"item": schema["items"]}, "required": ["item"]}
        item = _elements(lark, ToolSchema("", whole(items, schema)), form)
        return lark.row(lark.repeated(item), end)
    if form.unfold and schema.get("properties"):
        return lark.row(_elements(lark, ToolSchema("", schema), form), end)
    if not is_text(schema, schema):
        return lark.row(lark.json(schema, **LENIENT), form.gap, end)
    if (choices := words(schema, schema)) is not None:
        return lark.row(lark.any_of(map(lark.quoted, choices)), form.gap, end)
    return lark.text_until(end, characters_max(schema, schema))


def python_call(lark: Lark, tool: ToolSchema) -> Expression:
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


# ---------------------------------------------------------------- bare keys


@dataclass(frozen=True, slots=True)
class BareKeys:
    """Writes the grammar of calls in one of Gemma's formats. Immutable."""

    start: str
    end: str
    quote: str  # at both ends of a string
    nests: bool  # whether its parser reads arrays and objects, and braces in strings

    def __call__(self, lark: Lark, tool: ToolSchema) -> Expression:
        body = self._object(lark, tool.contained().schema, 0)
        return lark.row(self.start, "call:", lark.quoted(tool.name), body, self.end)

    def _object(self, lark: Lark, schema: dict[str, Any], depth: int) -> Expression:
        items = []
        for parameter in ToolSchema("", schema).parameters():
            part = resolved(parameter.schema, parameter.schema)
            is_nested = any(
                kind in ("array", "object") or isinstance(kind, dict) for kind in _kinds(part)
            )
            if is_nested and not self.nests:
                if parameter.is_required:
                    raise RequestError(
                        f"tool_choice asks for a call with the parameter {parameter.name!r}, an "
                        "array or an object, which this model cannot write. Use tool_choice "
                        '"auto".',
                        code="unsupported_tool_choice",
                        param="tool_choice",
                    )
                continue
            value = self._value(lark, parameter.schema, depth + 1)
            items.append((lark.row(lark.quoted(parameter.name), ":", value), parameter.is_required))
        return lark.row("{", lark.separated(items, ","), "}")

    def _value(self, lark: Lark, schema: Any, depth: int) -> Expression:
        assert 0 < depth <= DEPTH_MAX + 1, depth
        schema = whole(resolved(schema, schema), schema)
        parts = schema.pop("allOf", None)
        for part in parts if isinstance(parts, list) else ():
            part = resolved(part, schema)
            sides = [each for each in (schema, part) if isinstance(each.get("properties"), dict)]
            named = {n: p for each in sides for n, p in each["properties"].items()}
            required = [*schema.get("required", ()), *part.get("required", ())]
            schema = {**part, **schema} | (
                {"properties": named, "required": required} if named else {}
            )
        if depth > DEPTH_MAX:
            return lark.json(SCALAR)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        choices = choices if isinstance(choices, list) else []
        if words_and_numbers := [each for each in choices if not isinstance(each, dict | list)]:
            return lark.any_of(
                lark.row(self.quote, lark.quoted(each), self.quote)
                if isinstance(each, str)
                else lark.json({"const": each})
                for each in words_and_numbers
            )
        return lark.any_of([self._kind(lark, kind, schema, depth) for kind in _kinds(schema)])

    def _kind(self, lark: Lark, kind: Any, schema: dict[str, Any], depth: int) -> Expression:
        if isinstance(kind, dict):
            return self._value(lark, whole(kind, schema), depth + 1)
        if kind == "string":
            length = characters_max(schema, schema)
            return lark.row(
                self.quote, lark.text_until(self.quote, length, "" if self.nests else "}")
            )
        if kind == "object":
            return self._object(lark, schema, depth)
        if kind == "array":
            item = self._value(lark, whole(schema.get("items"), schema), depth + 1)
            return lark.row("[", lark.optional(item, lark.repeated(",", item)), "]")
        return lark.json({**schema, "type": kind}, **LENIENT)


def _kinds(schema: dict[str, Any]) -> list[Any]:
    """Return what a value may be: names of types, or schemas."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return list(schema[key])
    kinds = schema.get("type", "object" if "properties" in schema else ["string", "number"])
    return list(kinds) if isinstance(kinds, list) else [kinds]
