"""Parses the calls after a mark, in any form that the model may write there.

In elements, like `<function=NAME><parameter=KEY>VALUE</parameter></function>`, a value is plain
text, blanks included, and the tool's schema has the value's type. An argument that can
only be a text is written while it arrives.
"""

import ast
import json
import logging
import re
import warnings
from dataclasses import replace
from typing import Any, Final

import regex

from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.json_calls import (
    CallContext,
    CallsReader,
    CallWriter,
    Trust,
    json_calls,
    named_call,
)
from hearth.worker.stream.tool_calls.lenient_json import LenientJsonParser, as_json, json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm

log = logging.getLogger(__name__)

BLOCK_CHARS_MAX: Final = 100_000  # longest call that is parsed only when it is complete
LINES_MAX: Final = 32  # lines of a Python block; if one is malformed, each is parsed alone

BLANKS: Final = regex.compile(r"\s*+")
# Characters that a model may write after a call by mistake.
JUNK: Final = regex.compile(r"[\s}\])\"'`,;]*+")
_FENCE: Final = regex.compile(r"```\w*+(?=\W)")
_BARE_KEYS: Final = regex.compile(r"call:(?P<name>[\w.:-]++)\s*+(?=\{)")
_PYTHON: Final = regex.compile(r"\[?+\s*+[\w.-]++\s*+\(")
_NAME: Final = regex.compile(r"[^\s<>{}\[\]()\"'=,]++")

_GAP: Final = regex.compile(r"(?:\s|\\n)*+")  # GLM also spells newlines out
_CDATA: Final = "<![CDATA["
_CDATA_SECTION: Final = regex.compile(r"\s*+<!\[CDATA\[(.*?)\]\]>\s*+", regex.DOTALL)
PYTHON_CHARS_MAX: Final = 400_000  # longer source is not parsed

_IN_A_NAME: Final = re.compile(r"[\w-]")
_OPENED: Final = re.compile(r"\s*\(")
_STRING: Final = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_ESCAPE_OR_BREAK: Final = re.compile(r"\\.|[\r\n]", re.DOTALL)
# A backslash before a raw line break is text.
_BREAKS: Final = {"\n": "\\n", "\r": "\\r", "\\\n": "\\\\\\n", "\\\r": "\\\\\\r"}


def read_section(context: CallContext) -> ParserSteps[None]:
    """Read the calls after a mark, up to the mark that ends the calls, if there is one.

    Raises UnreadableOutput where the next text is no call. The calls before it are written, and the
    buffer keeps the rest.
    """
    buffer = context.buffer
    while True:
        yield from buffer.skip(BLANKS)
        yield from _read_call(context)
        for between in (BLANKS, JUNK):
            offset = yield from buffer.offset_after(between)
            if (yield from buffer.take(context.section.end, offset)):
                return
        char = yield from buffer.peek(offset)
        if not char or (yield from buffer.starts(context.section.start, offset)):
            buffer.at += offset
            return
        if char != "<":
            return
        buffer.hold()
        buffer.at += offset


def marked_calls(call: str, head: Any, end: str, section_end: str) -> CallsReader:
    """Return a reader of calls that each stand between marks.

    `call` is the mark before a call, which may be missing; `end` is the mark after it, and
    `section_end` the mark after all calls. The pattern `head` matches up to the arguments' JSON and
    has the group "name". It may have the group "id" for the call's id. It may have the group
    "number": without a number, the name may be an id.
    """

    def read(context: CallContext) -> ParserSteps[None]:
        context = replace(context, section=replace(context.section, end=end))
        buffer = context.buffer
        while True:
            yield from buffer.skip(BLANKS)
            if (yield from buffer.take(call)):
                yield from buffer.skip(BLANKS)
            found = yield from buffer.take_match(head)
            if not found:
                raise UnreadableOutput
            groups = found.groupdict()
            is_id, call_id = groups.get("number", "") is None, groups.get("id", "").strip()
            yield from named_call(context, found["name"], is_id=is_id, call_id=call_id)
            for mark in (end, section_end):
                yield from buffer.take(mark, (yield from buffer.offset_after(JUNK)))
            offset = yield from buffer.offset_after(BLANKS)
            if not (yield from buffer.starts(call, offset)):
                return
            buffer.hold()
            buffer.at += offset

    return read


def _read_call(context: CallContext) -> ParserSteps[None]:
    """Read one call, or several calls in some forms, but not the mark after a call."""
    buffer = context.buffer
    if (yield from buffer.take_match(_FENCE)):
        yield from buffer.skip(BLANKS)
    char = yield from buffer.peek()
    inner = (yield from buffer.offset_after(BLANKS, 1)) if char == "[" else 0
    if char == "{" or (inner and (yield from buffer.starts("{", inner))):
        yield from json_calls(context, Trust(any_name=context.section.takes_any_name))
        return
    bare = [form for form in context.forms if form.is_bare]
    for form in context.forms:
        head = None if form.is_bare else (yield from buffer.match(form.head))
        if head:
            yield from _read_element(context, form, head)
            return
    head = yield from buffer.take_match(_BARE_KEYS)
    if head:
        reader = LenientJsonParser(buffer, context.end_marks, context.section.quote)
        yield from named_call(context, head["name"], reader)
        return
    for form in bare:
        head = yield from buffer.match(form.head)
        if head and (yield from _is_bare_head(context, form, head)):
            yield from _read_element(context, form, head)
            return
    yield from _read_block(context)


def _is_bare_head(context: CallContext, form: TagForm, head: Any) -> ParserSteps[bool]:
    """Return whether a name without a mark begins a call: the text after the name decides."""
    offset = yield from context.buffer.offset_after(BLANKS, len(head[0]))
    is_known = bool(context.tools.known_name(head["name"]))
    marks = (form.begins, "{", *context.end_marks) if is_known else (form.begins,)
    if (yield from context.buffer.starts_any(marks, offset)):
        return True
    is_over = is_known and not (yield from context.buffer.peek(offset))
    return is_over and context.buffer.is_complete


def _read_block(context: CallContext) -> ParserSteps[None]:
    """Read calls in Python, or a tool's name and its only argument, once they are whole."""
    buffer = context.buffer
    name = yield from buffer.match(_NAME)
    is_named = bool(name) and bool(context.tools.known_name(name[0]))
    is_list = (yield from buffer.peek()) == "["
    is_python = bool((yield from buffer.match(_PYTHON))) and (is_named or is_list)
    if not is_named and not is_python:
        raise UnreadableOutput
    text, mark = yield from buffer.text_up_to(Marks(*context.end_marks))
    buffer.at -= len(mark)
    text = text.strip()
    # A tool's name before text without an end mark is no call.
    is_whole = bool(mark) or (buffer.is_complete and is_python)
    if len(text) > BLOCK_CHARS_MAX or not is_whole:
        raise UnreadableOutput
    calls = python_calls(text, context.tools) if is_python else []
    if is_python and not calls:  # one line may be malformed
        for line in text.splitlines()[:LINES_MAX]:
            calls += python_calls(line, context.tools)
    if not calls and not (is_named and mark):
        raise UnreadableOutput
    for call in calls:
        context.write(*call)
    if not calls:
        context.write(name[0], text[len(name[0]) :].strip() or "{}")


# ---------------------------------------------------------------- calls in elements


def _read_element(context: CallContext, form: TagForm, head: Any) -> ParserSteps[None]:
    """Read the call that begins with `head`. Raises UnreadableOutput if it is no call."""
    name = head["name"].strip("\"'").strip()
    writer = CallWriter(context)
    # Qwen may write <parameter=NAME> where <function=NAME> belongs.
    is_certain = context.section.takes_any_name and head.groupdict().get("tag") != "parameter"
    if not name or not (is_certain or context.tools.known_name(name)):
        raise UnreadableOutput
    context.buffer.at += len(head[0])
    blanks = yield from context.buffer.offset_after(_GAP)
    if (yield from context.buffer.take_match(form.json_opens, blanks)):
        yield from named_call(context, name)
        for mark in (form.json_closes, form.call_end):
            yield from context.buffer.take(mark, (yield from context.buffer.offset_after(_GAP)))
        return
    tool, _, key = name.rpartition(".")  # Muse may glue the first parameter to the name
    is_glued = not context.tools.known_name(name) and key in context.tools.arguments(tool)
    name = tool if is_glued else name
    if context.tools.known_name(name):
        writer.open(name)
    writer.write("{")
    first = form.opens.match(key.join((form.key[0], "".join(form.key[1:])))) if is_glued else None
    yield from _Arguments(context, form, writer, context.tools.known_name(name) or name).read(first)


class _Arguments:
    """Parses the arguments of one call."""

    def __init__(self, context: CallContext, form: TagForm, writer: CallWriter, name: str) -> None:
        self._context = context
        self._form = form
        self._writer = writer
        self._name = name
        self._keys: set[str] = set()
        # Marks, besides an argument's own, that may end the argument; marks between two arguments.
        self._ends = (form.call_end, context.section.end, *(() if form.unfold else (form.begins,)))
        self._between = Marks(form.begins, form.call_end, *context.end_marks)

    def read(self, first: Any = None) -> ParserSteps[None]:
        """Read all arguments and the end of the call, but not the mark after all calls.

        `first` is the match of the first argument's beginning, if it was read already. Raises
        UnreadableOutput if this is no call.
        """
        buffer, form, opened = self._context.buffer, self._form, first
        while True:
            if opened and not (yield from self._argument(opened)):
                mark = ""  # the text was cut off
                break
            skipped, mark = yield from buffer.text_up_to(self._between)
            if skipped.replace("\\n", "").strip() and not self._writer.is_open:
                raise UnreadableOutput
            if mark != form.call_end:
                buffer.at -= len(mark)
            if mark != form.begins:
                break
            opened = yield from buffer.take_match(form.opens)
            buffer.at += 0 if opened else 1
        if not self._writer.is_open:
            if not mark:
                raise UnreadableOutput
            self._writer.open(self._name)
        if mark or buffer.is_complete:
            self._writer.write("}")

    def _argument(self, opened: Any) -> ParserSteps[bool]:
        """Write one argument; False if the text was cut off in it."""
        key = opened["key"].strip().strip("\"'")
        # Of two arguments with one key, the first counts: the second goes to an unused writer.
        writer = CallWriter(self._context) if key in self._keys else self._writer
        prefix = f'{", " if self._keys else ""}"{json_text(key)}": '
        text_flag = opened.groupdict().get("text") if self._form.typed else None
        value = _Value(self._context.tools, writer, self._form, (self._name, key), prefix)
        if text_flag is not None:
            value.is_text = text_flag in ("true", "string")
            value.is_json = not value.is_text
        self._keys.add(key)
        value_end, depth = self._form.value_end.format(key), 0
        # The mark that opens an inner element of the same name:
        inner = f"{self._form.key[0]}{key}>" if self._form.unfold else ""
        ends = Marks(value_end, inner, *self._ends)
        while True:
            mark = yield from self._context.buffer.scan(ends, value.write)
            depth += (mark == inner) - (mark == value_end)
            is_inner = inner and mark in (inner, value_end) and depth >= 0
            if not mark or (not is_inner and (yield from self._is_end(mark, value_end))):
                break
            value.write(mark)
        if not mark and not self._context.buffer.is_complete:
            return False
        if mark != value_end:
            self._context.buffer.at -= len(mark)
        value.end()
        return True

    def _is_end(self, mark: str, value_end: str) -> ParserSteps[bool]:
        """Return whether the mark that was read ends the argument; otherwise the mark is text.

        The text after the mark decides. If the argument's own mark is missing, another mark may end
        the argument.
        """
        buffer, form, context = self._context.buffer, self._form, self._context
        if mark == form.begins and mark != value_end:
            opened = yield from buffer.match(form.opens, -len(mark))
            key = opened["key"].strip().strip("\"'") if opened else ""
            return key not in self._keys and key in context.tools.arguments(self._name)
        followers = {
            value_end: (form.begins, form.call_end, *context.end_marks),
            form.call_end: (context.section.end,),
        }.get(mark, (context.section.start,))
        offset = yield from buffer.offset_after(_GAP)
        if not (yield from buffer.peek(offset)):
            return True
        return (yield from buffer.starts_any(followers, offset))


class _Value:
    """Writes one argument: a text while it arrives, any other value at its end."""

    def __init__(
        self,
        tools: RequestTools,
        writer: CallWriter,
        form: TagForm,
        argument: tuple[str, str],
        prefix: str,
    ) -> None:
        """`argument` is the tool's name and the key; `prefix` is written before the value."""
        self._writer = writer
        self._tools = tools
        self._form = form
        self._edge = "\n" if form.trims_newline else ""  # newline at both ends, not in the value
        self._argument = argument
        self.is_text = tools.is_text(*argument)
        self.is_json = False  # True: JSON, whatever the schema says
        self._texts: list[str] = []  # pieces of a value that is written at its end
        self._text = ""  # text that is not written yet
        self._prefix: str | None = prefix  # None once it is written

    def write(self, text: str) -> None:
        """Add the next piece of the value."""
        if not self.is_text:
            self._texts.append(text)
            return
        self._text += text
        if self._prefix is not None:
            begun = self._text.removeprefix(self._edge)
            if not begun or _CDATA.startswith(begun.lstrip()[: len(_CDATA)]):
                return  # the beginning of the value is not certain yet
            self._writer.write(self._prefix + '"')
            self._prefix, self._text = None, begun
        body = self._text.removesuffix(self._edge)
        self._writer.write(json_text(body))
        self._text = self._text[len(body) :]

    def end(self) -> None:
        """End the value."""
        if self._prefix is None:
            self._writer.write('"')
            return
        text = (self._text or "".join(self._texts)).removeprefix(self._edge)
        text = text.removesuffix(self._edge)
        if found := _CDATA_SECTION.fullmatch(text):
            text = found[1]
        unfold, guesses = self._form.unfold, self._form.guesses_types
        fitting = (
            unfold(self._tools, *self._argument, text)
            if unfold
            else self._tools.argument_json(*self._argument, text, guesses=guesses)
        )
        self._writer.write(self._prefix + ((self.is_json and as_json(text)) or fitting))


# ---------------------------------------------------------------- calls in Python


def python_calls(text: str, tools: RequestTools) -> list[tuple[str, str]]:
    """Return the calls (name, arguments' JSON) in Python source that holds nothing but calls.

    Other source gives an empty list. `print(...)` around a call, a module before its name and a
    variable for its result are left out. Strings may have raw newlines.
    """
    if len(text) > PYTHON_CHARS_MAX:
        return []
    # Names that are no Python identifiers get substitutes.
    spelled = {f"_tool_{n}_": name for n, name in enumerate(tools.names) if not name.isidentifier()}
    source = text.strip()
    for written, name in spelled.items():
        source = _with_calls_of(written, name, source)
    calls = _calls_of(source, tools, spelled)
    unbroken = _STRING.sub(
        lambda string: _ESCAPE_OR_BREAK.sub(lambda e: _BREAKS.get(e[0], e[0]), string[0]), source
    )
    return calls if calls or unbroken == source else _calls_of(unbroken, tools, spelled)


def _calls_of(source: str, tools: RequestTools, spelled: dict[str, str]) -> list[tuple[str, str]]:
    try:
        with warnings.catch_warnings():  # about escapes that Python does not know
            warnings.simplefilter("ignore")
            return [
                _python_call(node, tools, spelled)
                for value in (getattr(line, "value", None) for line in ast.parse(source).body)
                for node in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])
            ]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        log.debug("code does not parse: %s", type(error).__name__)
        return []


def _with_calls_of(written: str, name: str, text: str) -> str:
    """Return `text` with calls of `written` in place of calls of `name`.

    The name is not compiled to a pattern: Python caches patterns, and other requests would share
    them.
    """
    parts, done = [], 0
    at = text.find(name) if name else -1
    while at >= 0:
        end = at + len(name)
        if _IN_A_NAME.match(text[at - 1 : at]) is None and _OPENED.match(text, end):
            parts += [text[done:at], written]
            done = end
        at = text.find(name, max(done, at + 1))
    return "".join([*parts, text[done:]])


def _python_call(node: Any, tools: RequestTools, spelled: dict[str, str]) -> tuple[str, str]:
    """Return the call in an expression. Raises ValueError if it is no call of a tool."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        (node,) = node.args
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    called = ast.unparse(node.func)
    names = (called, called.removesuffix(".call"), called.rpartition(".")[2])
    name = next(filter(None, (tools.known_name(spelled.get(n, n)) for n in names)), "")
    if not name:
        raise ValueError("no tool")
    arguments = dict(zip(tools.arguments(name), map(_literal, node.args), strict=False))
    if len(arguments) < len(node.args):
        raise ValueError("more arguments than the tool has")
    for keyword in node.keywords:
        value = _literal(keyword.value)
        arguments |= value if keyword.arg is None else {keyword.arg: value}
    text = json.dumps(arguments, default=str, allow_nan=False)
    for substitute, original in spelled.items():
        text = text.replace(substitute, original)
    return name, json.dumps(json.loads(text), ensure_ascii=False)


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonWords().visit(node))


class _JsonWords(ast.NodeTransformer):
    """Reads JSON's words as Python's: templates show nested values as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node
