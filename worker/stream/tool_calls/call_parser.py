"""Parses the calls behind a mark, in whatever form the model writes them there."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import regex

from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import Trust, json_calls, named_call
from hearth.worker.stream.tool_calls.lenient_json import LenientJsonParser
from hearth.worker.stream.tool_calls.python_calls import python_calls
from hearth.worker.stream.tool_calls.tag_form import TagForm
from hearth.worker.stream.tool_calls.xml_calls import element_call

BLOCK_CHARS_MAX: Final = 100_000  # of a call that only a parser can read
LINES_MAX: Final = 32  # of a block in Python with a malformed line

BLANKS: Final = regex.compile(r"\s*+")
# What may be too much behind a call.
JUNK: Final = regex.compile(r"[\s}\])\"'`,;]*+")
_FENCE: Final = regex.compile(r"```\w*+(?=\W)")
_BARE_KEYS: Final = regex.compile(r"call:(?P<name>[\w.:-]++)\s*+(?=\{)")
_PYTHON: Final = regex.compile(r"\[?+\s*+[\w.-]++\s*+\(")
_NAME: Final = regex.compile(r"[^\s<>{}\[\]()\"'=,]++")

CallsReader = Callable[[CallContext], ParserSteps[None]]


def read_section(context: CallContext) -> ParserSteps[None]:
    """Read the calls behind a mark up to their end mark, or to where it is missing.

    Raises UnreadableOutput where the next call is none, with those before it written and the buffer
    holding the rest.
    """
    buffer = context.buffer
    while True:
        yield from buffer.skip(BLANKS)
        yield from _one(context)
        for between in (BLANKS, JUNK):
            offset = yield from buffer.run(between)
            if (yield from buffer.starts(context.end, offset)):
                buffer.at += offset + len(context.end)
                return
        char = yield from buffer.peek(offset)
        if not char or (yield from buffer.starts(context.start, offset)):
            buffer.at += offset
            return
        if char != "<":
            return
        buffer.hold()
        buffer.at += offset


def marked_calls(call: str, head: Any, end: str, section_end: str) -> CallsReader:
    """Return what reads calls of which each stands between marks of its own.

    `call` begins one and may be missing, `head` has the group "name" and leads to the arguments'
    JSON, `end` ends one and `section_end` all. Where `head` also has the group "number" and none is
    written, the name may be an id. The group "id", where `head` has it, is the call's id.
    """

    def read(context: CallContext) -> ParserSteps[None]:
        context = replace(context, end=end)
        buffer = context.buffer
        while True:
            yield from buffer.skip(BLANKS)
            if (yield from buffer.starts(call)):
                buffer.at += len(call)
                yield from buffer.skip(BLANKS)
            found = yield from buffer.match(head)
            if not found:
                raise UnreadableOutput
            buffer.at += len(found[0])
            groups = found.groupdict()
            is_id, call_id = groups.get("number", "") is None, groups.get("id", "").strip()
            yield from named_call(context, found["name"], is_id=is_id, call_id=call_id)
            for mark in (end, section_end):
                offset = yield from buffer.run(JUNK)
                if (yield from buffer.starts(mark, offset)):
                    buffer.at += offset + len(mark)
            offset = yield from buffer.run(BLANKS)
            if not (yield from buffer.starts(call, offset)):
                return
            buffer.hold()
            buffer.at += offset

    return read


@dataclass(frozen=True, slots=True)
class Section:
    """The marks around a model's calls, and what reads what stands between. Immutable."""

    start: str
    end: str = ""
    read: CallsReader = read_section
    is_own: bool = True  # else only calls of tools of the request count
    is_head: bool = False  # the mark is the beginning of the call itself
    is_behind_name: bool = False  # the name of a tool stands in front of it
    quote: str = ""  # around strings in which nothing is escaped


def _one(context: CallContext) -> ParserSteps[None]:
    """Read what is one call in most forms, without the mark behind it."""
    buffer = context.buffer
    fence = yield from buffer.match(_FENCE)
    if fence:
        buffer.at += len(fence[0])
        yield from buffer.skip(BLANKS)
    char = yield from buffer.peek()
    if char == "{" or (char == "[" and (yield from _is_list(context))):
        yield from json_calls(context, Trust(any_name=context.is_own))
        return
    bare = [form for form in context.forms if form.is_bare]
    for form in context.forms:
        head = None if form.is_bare else (yield from buffer.match(form.head))
        if head:
            yield from _element(context, form, head)
            return
    head = yield from buffer.match(_BARE_KEYS)
    if head:
        buffer.at += len(head[0])
        reader = LenientJsonParser(buffer, context.marks, context.quote)
        yield from named_call(context, head["name"], reader)
        return
    for form in bare:
        head = yield from buffer.match(form.head)
        if head and (yield from _is_bare_head(context, form, head)):
            yield from _element(context, form, head)
            return
    yield from _block(context)


def _is_list(context: CallContext) -> ParserSteps[bool]:
    offset = yield from context.buffer.run(BLANKS, 1)
    return (yield from context.buffer.starts("{", offset))


def _element(context: CallContext, form: TagForm, head: Any) -> ParserSteps[None]:
    if not context.is_own and not context.tools.known(head["name"].strip("\"'")):
        raise UnreadableOutput
    context.buffer.at += len(head[0])
    yield from element_call(context, form, head)


def _is_bare_head(context: CallContext, form: TagForm, head: Any) -> ParserSteps[bool]:
    """Return whether a name that stands alone begins a call: nearly any text begins with one."""
    offset = yield from context.buffer.run(BLANKS, len(head[0]))
    if (yield from context.buffer.starts(form.begins, offset)):
        return True
    if not context.tools.known(head["name"]):
        return False
    for mark in ("{", *context.marks):
        if (yield from context.buffer.starts(mark, offset)):
            return True
    return not (yield from context.buffer.peek(offset)) and context.buffer.is_complete


def _block(context: CallContext) -> ParserSteps[None]:
    """Read calls in Python, or the name of a tool and its one text, once they are whole."""
    buffer = context.buffer
    name = yield from buffer.match(_NAME)
    is_named = bool(name) and bool(context.tools.known(name[0]))
    is_list = (yield from buffer.peek()) == "["
    is_python = bool((yield from buffer.match(_PYTHON))) and (is_named or is_list)
    if not is_named and not is_python:
        raise UnreadableOutput
    texts: list[str] = []
    mark = yield from buffer.scan(Marks(*context.marks), texts.append)
    buffer.at -= len(mark)
    text = "".join(texts).strip()
    # A name in front of prose that never ends is none of a call.
    is_whole = bool(mark) or (buffer.is_complete and is_python)
    if len(text) > BLOCK_CHARS_MAX or not is_whole:
        raise UnreadableOutput
    calls = python_calls(text, context.tools) if is_python else []
    if is_python and not calls:  # one line may be malformed
        for line in text.splitlines()[:LINES_MAX]:
            calls += python_calls(line, context.tools)
    if not calls and not (is_named and mark):
        raise UnreadableOutput
    buffer.release()
    context.write_all(calls)
    if not calls:
        context.write(name[0], text[len(name[0]) :].strip() or "{}")
