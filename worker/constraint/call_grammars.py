"""Builds grammars of tool calls in all formats, in llguidance's dialect of Lark.

The grammars allow what worker/stream parses as calls. In a format without types, a value is bare
text if the schema wants a string, otherwise JSON.
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
    allowed_strings,
    characters_max,
    is_text,
    resolved,
    with_definitions,
)
from hearth.worker.stream.tool_calls.tag_form import MAY_BREAK, TagForm

# Templates write one blank after a separator. With more blanks allowed, a weak model writes blanks
# until its answer is cut off.
JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
RULES_MAX: Final = 10_000
GRAMMAR_CHARS_MAX: Final = 2_000_000  # characters of all schemas in a grammar together
LENIENT: Final = {"lenient": True}  # keywords that llguidance does not know are not enforced


class Expression(str):
    """A piece of Lark source. Among such pieces, any other string is literal text."""


NOTHING: Final = Expression('""')
TEXT: Final = Expression("TEXT")  # at least one character, and no mark
NEWLINES: Final = Expression("(NEWLINES)?")  # at most three, as ERNIE writes
NEWLINE: Final = Expression('("\\n")?')  # at most one
_HEAD: Final = "%llguidance {}\nTEXT: /(?s:.+)/\nNEWLINES: /\\n{1,3}/\n"


class Lark:
    """Builds one grammar. Owner: the prompt thread.

    Invariants: a mark is a token that never stands for other text. A mark in literal text stands
    for the mark's token, and free text never holds such a token. There are at most RULES_MAX rules.
    """

    line_end: Expression = NEWLINE  # text at the places where templates end a line

    def __init__(self, marks: Mapping[str, int]) -> None:
        assert "" not in marks, "an empty mark would split every text"
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        # A newline is a literal of its own: llguidance's lexer never goes back from a literal that
        # begins with a newline to the newline alone.
        self._split = re.compile("(" + "|".join(map(re.escape, [*longest_first, "\n"])) + ")")
        self._rules: list[str] = []
        self._chars = 0  # characters of all rules so far

    def concat(self, *parts: str) -> Expression:
        """Return the parts one after another; strings that are no expressions are literal text."""
        found = [part if isinstance(part, Expression) else self._literal(part) for part in parts]
        return Expression(" ".join(part for part in found if part != NOTHING) or NOTHING)

    @staticmethod
    def quoted(text: str) -> Expression:
        """Return a client's text, in which nothing counts as a mark."""
        return Expression(json.dumps(text))

    def any_of(self, choices: Iterable[str]) -> Expression:
        """Return a choice: one of `choices` stands here."""
        return self.rule(" | ".join(self.concat(choice) for choice in choices))

    def optional(self, *parts: str) -> Expression:
        return Expression(f"({self.concat(*parts)})?")

    def repeated(self, *parts: str) -> Expression:
        """Return a repetition: the parts stand here any number of times."""
        return Expression(f"({self.concat(*parts)})*")

    def text_until(self, end: str, characters_max: int | None = None, but: str = "") -> Expression:
        """Return free text, maybe empty, without the characters `but`, and `end` after it."""
        assert end and (characters_max is None or characters_max >= 0), (end, characters_max)
        # An expression of Lark stands on one line.
        character = "[^{}]".format(re.escape(but).replace("\n", "n")) if but else "(?s:.)"
        text = f"{character}{'*' if characters_max is None else f'{{0,{characters_max}}}'}"
        before, mark, *_ = (*self._split.split(end, maxsplit=1), "")
        if mark:  # the text ends with the part of `end` before the mark
            before = re.escape(before).replace("/", r"\/")
            return self.concat(self.rule(f"/{text}{before}/"), end[end.index(mark) :])
        return self.rule(f"/{text}/", f"[suffix={json.dumps(end)}]")

    def json(self, schema: Mapping[str, Any], **options: Any) -> Expression:
        """Return a JSON value of this schema, which must contain its definitions."""
        document = {**schema, "x-guidance": {**JSON_OPTIONS, **options}}
        return self.rule(f"%json {json.dumps(document)}")

    def elements(self, items: Sequence[tuple[str, bool]]) -> Expression:
        """Return the items (expression, is required) in their order, one after another."""
        return self.concat(*(item if needed else self.optional(item) for item, needed in items))

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> Expression:
        """Return the items (expression, is required) in their order, with separators between."""
        first, later = NOTHING, NOTHING  # the remaining items, without and with an item before them
        for item, is_required in reversed(items):
            with_first, with_later = self.concat(item, later), self.concat(separator, item, later)
            first = self.rule(with_first if is_required else f"{with_first} | {first}")
            later = self.rule(with_later if is_required else f"{with_later} | {later}")
        return first

    def rule(self, body: str, options: str = "") -> Expression:
        """Add a rule, and return its name, which stands for the rule."""
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
        """Return the source of the grammar that begins with `start`."""
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

DEPTH_MAX: Final = 8  # levels of nested values
SCALAR: Final = {"type": ["number", "boolean", "null"]}

GrammarWriter = Callable[[Lark, ToolSchema], Expression]
CallsWriter = Callable[[Lark, Sequence[ToolSchema], bool], Expression]  # bool: is_parallel


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a turn: `start`, calls separated by `between`, and `end`. Immutable.

    A newline may follow.
    """

    call: GrammarWriter
    mark: str  # text that begins calls and no other text
    start: str = ""
    end: str = ""
    between: str = NEWLINE
    is_single: bool = False  # the format allows one call only

    def expression(self, lark: Lark, tools: Sequence[ToolSchema], is_parallel: bool) -> Expression:
        """Return a turn of at least one call."""
        assert tools, "a call needs a tool"
        call = lark.any_of([self.call(lark, tool) for tool in tools])
        more = lark.repeated(self.between, call) if is_parallel and not self.is_single else NOTHING
        return lark.concat(self.start, call, more, self.end, NEWLINE)

    def text(self, calls: Iterable[str]) -> str:
        """Return the text of a turn with the texts of calls."""
        between = "\n" if isinstance(self.between, Expression) else self.between
        return f"{self.start}{between.join(calls)}{self.end}"


@dataclass(frozen=True, slots=True)
class MessageGrammar:
    """The grammar of an answer that is a sequence of messages. Immutable."""

    mark: str  # text that begins calls and no other text
    thinking: str  # beginning of a thinking message
    thinking_end: str
    thinking_close: str  # text that is written where thinking has to end
    again: str  # beginning of further thinking directly after `thinking_close`
    final_message: Callable[[Lark, Expression], Expression]  # makes a message with a text
    call_message: CallsWriter
    addressed_call: CallsWriter  # a call from `mark` on
    turn: Callable[[Lark, Expression, str], Expression]  # takes the last message and the opening


def message_grammar(
    calls: CallGrammar,
    thinking: tuple[str, str, str],
    after_thinking: str,
    final: tuple[str, str],
    opens: str = "",
    skipped: str = "",
    to: tuple[str, str] | None = None,
) -> MessageGrammar:
    """Return the grammar of thinking messages, and of text or calls after them.

    `thinking` has the beginning of a thinking message in two pieces, the second of which names the
    kind, and the message's end; `after_thinking` follows the message. `final` stands around the
    answer's text, and `skipped` before calls. `opens` stands before the text or the calls, unless
    the prompt ends with `opens`. `to` stands around the tool's name, in formats with a name before
    each call.
    """
    front, kind, end = thinking

    def addressed(lark: Lark, tool: ToolSchema) -> Expression:
        name = (to[0], lark.quoted(tool.name), to[1]) if to else ()
        return lark.concat(*name, calls.call(lark, tool))

    def turn(lark: Lark, last: Expression, opening: str) -> Expression:
        text = lark.concat(lark.optional(TEXT), end, after_thinking)
        begun = text if opening.endswith(f"{front}{kind}") else NOTHING
        head = "" if opening.endswith(opens) else opens
        return lark.concat(begun, lark.repeated(front, kind, text), head, last)

    written = replace(calls, call=addressed)
    return MessageGrammar(
        mark=calls.mark,
        thinking=f"{front}{kind}",
        thinking_end=end,
        thinking_close=f"{end}{after_thinking}{front}",
        again=kind,
        final_message=lambda lark, answer: lark.concat(final[0], answer, final[1]),
        call_message=lambda lark, tools, several: lark.concat(
            skipped, written.expression(lark, tools, several)
        ),
        addressed_call=lambda lark, tools, several: calls.expression(
            lark, tools, several and to is None
        ),
        turn=turn,
    )


def json_arguments(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.json(tool.schema, **LENIENT)


def json_call(before: str, middle: str, after: str) -> GrammarWriter:
    """Return the grammar of calls with the arguments in one JSON object after the name."""

    def write(lark: Lark, tool: ToolSchema) -> Expression:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        return lark.concat(before, lark.quoted(name), middle, json_arguments(lark, tool), after)

    return write


def json_call_text(before: str, middle: str, after: str) -> Callable[[str, Any], str]:
    """Return a function that writes a call of `json_call` from a name and arguments."""

    def text(name: str, arguments: Any) -> str:
        name, written = map(written_numbers.dumps, (name, arguments))
        return f"{before}{name[1:-1]}{middle}{written}{after}"

    return text


def tagged(form: TagForm) -> GrammarWriter:
    """Return the grammar of calls with an element for each parameter, in the schema's order."""

    def write(lark: Lark, tool: ToolSchema) -> Expression:
        head = lark.concat(form.name[0], lark.quoted(tool.name), *map(_literal, form.name[1:]))
        return lark.concat(
            head, _elements(lark, tool.contained(), form), form.call_end, form.after_call
        )

    return write


def _literal(text: str) -> str:
    return NEWLINE if text == MAY_BREAK else text


def _elements(lark: Lark, tool: ToolSchema, form: TagForm) -> Expression:
    """Return the grammar of an element for each parameter."""
    elements = []
    line_end = lark.line_end if form.has_lines else NEWLINE
    for parameter in tool.parameters():
        head = lark.concat(form.key[0], lark.quoted(parameter.name), *map(_literal, form.key[1:]))
        if form.typed:
            is_json = not is_text(parameter.schema, parameter.schema)
            head = lark.concat(head, lark.any_of(form.typed[1:] if is_json else form.typed[:1]))
        value = _tagged_value(lark, parameter, form)
        elements.append((lark.rule(lark.concat(head, value, line_end)), parameter.is_required))
    return lark.elements(elements)


def _tagged_value(lark: Lark, parameter: Parameter, form: TagForm) -> Expression:
    """Return a value and the tag that ends it."""
    schema, end = parameter.schema, form.value_end.format(parameter.name)
    if form.unfold and isinstance(schema.get("items"), dict):
        items = {"properties": {"item": schema["items"]}, "required": ["item"]}
        item = _elements(lark, ToolSchema("", with_definitions(items, schema)), form)
        return lark.concat(lark.repeated(item), end)
    if form.unfold and schema.get("properties"):
        return lark.concat(_elements(lark, ToolSchema("", schema), form), end)
    if not is_text(schema, schema):
        return lark.concat(lark.json(schema, **LENIENT), form.gap, end)
    if (choices := allowed_strings(schema, schema)) is not None:
        return lark.concat(lark.any_of(map(lark.quoted, choices)), form.gap, end)
    return lark.text_until(end, characters_max(schema, schema))


def python_call(lark: Lark, tool: ToolSchema) -> Expression:
    """Return a call with keyword arguments. JSON's strings and numbers are Python's too."""
    items = [
        (
            lark.concat(parameter.name, "=", lark.json(parameter.schema, **LENIENT)),
            parameter.is_required,
        )
        for parameter in tool.contained().parameters()
        if parameter.name.isidentifier()
    ]
    return lark.concat(lark.quoted(tool.name), "(", lark.separated(items, ", "), ")")


# ---------------------------------------------------------------- bare keys


@dataclass(frozen=True, slots=True)
class BareKeys:
    """Writes the grammar of calls in one of Gemma's formats. Immutable."""

    start: str
    end: str
    quote: str  # mark at both ends of a string
    nests: bool  # whether the format's parser reads arrays and objects, and braces in strings

    def __call__(self, lark: Lark, tool: ToolSchema) -> Expression:
        body = self._object(lark, tool.contained().schema, 0)
        return lark.concat(self.start, "call:", lark.quoted(tool.name), body, self.end)

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
            items.append(
                (lark.concat(lark.quoted(parameter.name), ":", value), parameter.is_required)
            )
        return lark.concat("{", lark.separated(items, ","), "}")

    def _value(self, lark: Lark, schema: Any, depth: int) -> Expression:
        assert 0 < depth <= DEPTH_MAX + 1, depth
        schema = with_definitions(resolved(schema, schema), schema)
        parts = schema.pop("allOf", None)
        for part in parts if isinstance(parts, list) else ():
            part = resolved(part, schema)
            sides = [side for side in (schema, part) if isinstance(side.get("properties"), dict)]
            named = {n: p for side in sides for n, p in side["properties"].items()}
            required = [*schema.get("required", ()), *part.get("required", ())]
            schema = {**part, **schema} | (
                {"properties": named, "required": required} if named else {}
            )
        if depth > DEPTH_MAX:
            return lark.json(SCALAR)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        choices = choices if isinstance(choices, list) else []
        if scalars := [value for value in choices if not isinstance(value, dict | list)]:
            return lark.any_of(
                lark.concat(self.quote, lark.quoted(value), self.quote)
                if isinstance(value, str)
                else lark.json({"const": value})
                for value in scalars
            )
        return lark.any_of([self._kind(lark, kind, schema, depth) for kind in _kinds(schema)])

    def _kind(self, lark: Lark, kind: Any, schema: dict[str, Any], depth: int) -> Expression:
        if isinstance(kind, dict):
            return self._value(lark, with_definitions(kind, schema), depth + 1)
        if kind == "string":
            length = characters_max(schema, schema)
            return lark.concat(
                self.quote, lark.text_until(self.quote, length, "" if self.nests else "}")
            )
        if kind == "object":
            return self._object(lark, schema, depth)
        if kind == "array":
            item = self._value(lark, with_definitions(schema.get("items"), schema), depth + 1)
            return lark.concat("[", lark.optional(item, lark.repeated(",", item)), "]")
        return lark.json({**schema, "type": kind}, **LENIENT)


def _kinds(schema: dict[str, Any]) -> list[Any]:
    """Return the kinds of a value: names of types, or schemas."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return list(schema[key])
    kinds = schema.get("type", "object" if "properties" in schema else ["string", "number"])
    return list(kinds) if isinstance(kinds, list) else [kinds]
