"""Parses calls in JSON, like `{"name": ..., "arguments": {...}}`, and writes calls.

Text is held back until the parser is certain that it is a call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import regex

from hearth.shared.written_numbers import object_or_text
from hearth.worker.stream.answer_parts import AnswerCollector
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.lenient_json import LenientJsonParser, as_json, json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm

NAME_CHARS_MAX: Final = 128
_NAMES: Final = frozenset({"name", "tool_name", "function", "tool"})
_ARGUMENTS: Final = frozenset({"arguments", "parameters", "args", "input"})
_BESIDE: Final = frozenset({"id", "type", "index", "tool_call_id", "call_id"})
_SEPARATORS: Final = regex.compile(r"[\s,;]*+")


@dataclass(frozen=True, slots=True)
class Section:
    """The marks around a model's calls, and the reader of these calls. Immutable."""

    start: str  # "" without a mark
    end: str = ""
    read: "CallsReader | None" = None  # None: calls in any form
    takes_any_name: bool = True  # False: only calls of the request's tools count
    is_head: bool = False  # the mark is the beginning of the call itself
    follows_name: bool = False  # the name of a tool stands before the mark
    quote: str = ""  # mark around strings; such strings have no escapes


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the functions that parse calls share. Owner: the inference thread."""

    buffer: LookaheadBuffer
    collector: AnswerCollector
    tools: RequestTools
    on_call: Callable[[], None]  # runs before each call is written
    section: Section  # the section of the calls
    forms: tuple[TagForm, ...]  # forms of calls written as elements, the model's first

    def write(self, name: str, arguments: str, call_id: str = "") -> None:
        """Write a whole call; `arguments` is a JSON object or another text.

        Text that is no object becomes the argument of a tool whose only argument is a text.
        """
        writer = CallWriter(self, call_id)
        sole = self.tools.sole_text(name)
        if sole and isinstance(object_or_text(arguments), str):
            arguments = f'{{"{json_text(sole)}": "{json_text(arguments)}"}}'
        writer.write(arguments)
        writer.open(name)

    @property
    def end_marks(self) -> tuple[str, str]:
        """The marks that end a call when they stand outside of its strings."""
        return self.section.end, self.section.start


CallsReader = Callable[[CallContext], ParserSteps[None]]


class CallWriter:
    """Writes one call. Owner: the inference thread.

    Invariant: nothing reaches the collector before the call is open, and it opens once.
    """

    def __init__(self, context: CallContext, call_id: str = "") -> None:
        self.call_id = call_id  # the id that the model wrote
        self.is_open = False
        self._texts: list[str] = []
        self._context = context

    @property
    def text(self) -> str:
        """The text that was written before the call was open."""
        return "".join(self._texts)

    def open(self, name: str, *, is_id: bool = False) -> None:
        """Begin the call of the tool `name`; with `is_id`, `name` may be an id of the tool.

        Raises UnreadableOutput for an empty name.
        """
        assert not self.is_open
        name = self._context.tools.called_tool(name, self.text, is_id=is_id)
        if not name:
            raise UnreadableOutput
        self.is_open = True
        self._context.buffer.release()
        self._context.on_call()
        self._context.collector.call(name, self.call_id)
        self._context.collector.arguments(self.text)

    def write(self, text: str) -> None:
        """Write a piece of the arguments' JSON."""
        if self.is_open:
            self._context.collector.arguments(text)
        else:
            self._texts.append(text)


@dataclass(frozen=True, slots=True)
class Trust:
    """Says which objects are accepted as a call. Immutable."""

    any_name: bool = True  # also objects with the name of an unknown tool
    any_order: bool = True  # also objects with the arguments before the name
    is_keyed: bool = False  # the key of the arguments may be the tool's name
    has_id: bool = False  # the object has an id, which may stand after the arguments


def json_calls(context: CallContext, trust: Trust) -> ParserSteps[None]:
    """Read the call or the list of calls that begins here, and the calls directly after it.

    Raises UnreadableOutput where the next object is no call; the calls before it are written.
    """
    buffer = context.buffer
    is_list = yield from buffer.take("[")
    while True:
        yield from _CallObjectParser(context, trust, "[{" if is_list else "{").read()
        offset = yield from buffer.offset_after(_SEPARATORS)
        if is_list and (yield from buffer.take("]", offset)):
            return
        if not (yield from buffer.starts("{", offset)):
            return
        buffer.hold()
        buffer.at += offset


def named_call(
    context: CallContext,
    name: str,
    reader: LenientJsonParser | None = None,
    is_id: bool = False,
    call_id: str = "",
) -> ParserSteps[None]:
    """Read the arguments of the call of `name`: the JSON object that begins here.

    `is_id`: if no tool has that name, the only tool with such arguments is called.
    `call_id` is the id that the model wrote for the call, "" without one.
    Raises UnreadableOutput if no such object stands here.
    """
    reader = reader or LenientJsonParser(context.buffer, context.end_marks)
    writer = CallWriter(context, call_id)
    if not 0 < len(name) <= NAME_CHARS_MAX or (yield from reader.blanks()) != "{":
        raise UnreadableOutput
    if context.tools.known_name(name):
        writer.open(name)
    is_whole = yield from reader.value(writer.write)
    if not writer.is_open:
        if not is_whole or isinstance(object_or_text(writer.text), str):
            raise UnreadableOutput
        writer.open(name, is_id=is_id)


class _CallObjectParser:
    """Parses one call that is an object with a name and arguments."""

    def __init__(self, context: CallContext, trust: Trust, outer: str) -> None:
        """`outer` holds the opening brackets up to the call's own brace."""
        self._context = context
        self._trust = trust
        self._json = LenientJsonParser(context.buffer, context.end_marks)
        self._json.outer = outer
        self._writer = CallWriter(context)
        self._name = ""
        self._text: str | None = None  # arguments that were given as a text

    def read(self) -> ParserSteps[None]:
        """Parse and write the call. Raises UnreadableOutput if no call stands here."""
        if (yield from self._json.blanks()) != "{":
            raise UnreadableOutput
        self._context.buffer.at += 1
        depth = 1
        while depth:
            key = yield from self._json.key()
            if key:
                depth += yield from self._member(key)
            elif key == "" and not (
                self._writer.is_open or (self._trust.has_id and self._writer.text)
            ):
                raise UnreadableOutput
            elif self._json.is_closed:
                depth -= 1
            elif key is None:
                break
        yield from self._finish(is_closed=not depth)

    def _member(self, key: str) -> ParserSteps[bool]:
        """Read the value of a key; True if the value is an object of which only `{` was read."""
        char = yield from self._json.blanks()
        if self._trust.is_keyed and char == "{" and not self._name:
            self._name = key
            yield from self._read_arguments(char)
        elif key in ("function", "tool") and char == "{" and not self._name:
            self._context.buffer.at += 1
            self._json.outer += "{"
            return True
        if key in _NAMES and not self._name:
            yield from self._read_name()
        elif key in _ARGUMENTS and not self._writer.is_open and not self._writer.text:
            if not self._name and not self._trust.any_order:
                raise UnreadableOutput
            yield from self._read_arguments(char)
        elif self._name or key in _BESIDE:
            texts: list[str] = []
            yield from self._json.value(texts.append)
            if self._trust.has_id and key == "id":
                self._writer.call_id = "".join(texts).strip('"')
        else:
            raise UnreadableOutput
        return False

    def _read_name(self) -> ParserSteps[None]:
        texts: list[str] = []
        yield from self._json.value(texts.append)
        parsed = object_or_text(f'{{"name": {"".join(texts)}}}')
        name = parsed["name"] if isinstance(parsed, dict) else None
        if not isinstance(name, str) or not 0 < len(name.strip()) <= NAME_CHARS_MAX:
            raise UnreadableOutput
        self._name = name.strip()
        if not self._trust.any_name and not self._context.tools.known_name(self._name):
            raise UnreadableOutput
        if self._writer.text and self._context.tools.known_name(self._name):
            self._writer.open(self._name)

    def _read_arguments(self, char: str) -> ParserSteps[None]:
        if char == "{":
            if self._context.tools.known_name(self._name) and not self._trust.has_id:
                self._writer.open(self._name)
            yield from self._json.value(self._writer.write)
        elif char and char in "\"'":
            texts: list[str] = []
            if not (yield from self._json.string(texts.append)):
                raise UnreadableOutput
            self._text = "".join(texts).strip()
        elif (yield from self._json.word()) != "null":
            raise UnreadableOutput

    def _finish(self, is_closed: bool) -> ParserSteps[None]:
        """Write the rest of the call. Raises UnreadableOutput if the object is no call."""
        buffer, is_known = self._context.buffer, bool(self._context.tools.known_name(self._name))
        if self._trust.has_id and is_known and self._writer.text and not is_closed:
            self._writer.open(self._name)  # only the call's id may be missing
        if self._writer.is_open:
            return
        is_over = not (yield from buffer.peek())
        if not self._name or not (is_closed or (is_known and (buffer.is_complete or not is_over))):
            raise UnreadableOutput
        given_text = self._text or ""
        text = self._writer.text if self._text is None else given_text
        if given_text.startswith("{"):  # the text holds the JSON of the arguments
            text = as_json(given_text)
        is_text = isinstance(object_or_text(text or "{}"), str)
        if not is_known and is_text and (self._text is None or text.startswith("{")):
            raise UnreadableOutput
        self._context.write(self._name, text or "{}", self._writer.call_id)
