"""Parses calls in elements, as `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

A value is plain text, blanks at its ends and all; the tool's schema has its type. An argument that
can only be a text is written as it comes.
"""

from typing import Any, Final

import regex

from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_writer import CallContext, CallWriter
from hearth.worker.stream.tool_calls.json_calls import named_call
from hearth.worker.stream.tool_calls.lenient_json import as_json, json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm

_BLANKS: Final = regex.compile(r"(?:\s|\\n)*+")  # GLM also spells newlines out
_CDATA: Final = "<![CDATA["
_CDATA_SECTION: Final = regex.compile(r"\s*+<!\[CDATA\[(.*?)\]\]>\s*+", regex.DOTALL)


def element_call(context: CallContext, form: TagForm, head: Any) -> ParserSteps[None]:
    """Read the call behind `head`, which was read. Raises UnreadableOutput where it is none."""
    name = head["name"].strip("\"'").strip()
    writer = CallWriter(context)
    # Qwen may write <parameter=NAME> where <function=NAME> belongs.
    is_certain = head.groupdict().get("tag") != "parameter" or context.tools.known(name)
    if not name or not is_certain:
        raise UnreadableOutput
    blanks = yield from context.buffer.run(_BLANKS)
    opened = yield from context.buffer.match(form.json_opens, blanks)
    if opened:
        context.buffer.at += blanks + len(opened[0])
        yield from named_call(context, name)
        for mark in (form.json_closes, form.call_end):
            blanks = yield from context.buffer.run(_BLANKS)
            if (yield from context.buffer.starts(mark, blanks)):
                context.buffer.at += blanks + len(mark)
        return
    tool, _, key = name.rpartition(".")  # Muse may glue the first parameter to the name
    is_glued = not context.tools.known(name) and key in context.tools.arguments(tool)
    name = tool if is_glued else name
    if context.tools.known(name):
        writer.open(name)
    writer.write("{")
    first = form.opens.match(key.join((form.key[0], "".join(form.key[1:])))) if is_glued else None
    yield from _Arguments(context, form, writer, context.tools.known(name) or name).read(first)


class _Arguments:
    """Parses the arguments of one call."""

    def __init__(self, context: CallContext, form: TagForm, writer: CallWriter, name: str) -> None:
        self._context = context
        self._form = form
        self._writer = writer
        self._name = name
        self._keys: set[str] = set()
        # What an argument may end at beside its own mark, and what may stand between two.
        self._ends = (form.call_end, context.end, *(() if form.unfold else (form.begins,)))
        self._between = Marks(form.begins, form.call_end, *context.marks)

    def read(self, first: Any = None) -> ParserSteps[None]:
        """Read all arguments and what ends the call, except for the mark behind calls.

        `first` is what the first one begins with, where that was read. Raises UnreadableOutput
        where it is no call.
        """
        buffer, form = self._context.buffer, self._form
        if first and not (yield from self._argument(first)):
            self._end("")
            return
        while True:
            skipped: list[str] = []
            mark = yield from buffer.scan(self._between, skipped.append)
            if "".join(skipped).replace("\\n", "").strip() and not self._writer.is_open:
                raise UnreadableOutput
            if mark != form.call_end:
                buffer.at -= len(mark)
            if mark != form.begins:
                self._end(mark)
                return
            opened = yield from buffer.match(form.opens)
            buffer.at += len(opened[0]) if opened else 1
            if opened and not (yield from self._argument(opened)):
                self._end("")
                return

    def _end(self, mark: str) -> None:
        """End the call at `mark`, or where the text is over ("").

        It is closed unless it was cut off. Raises UnreadableOutput where it is none.
        """
        if not self._writer.is_open:
            if not mark:
                raise UnreadableOutput
            self._writer.open(self._name)
        if mark or self._context.buffer.is_complete:
            self._writer.write("}")

    def _argument(self, opened: Any) -> ParserSteps[bool]:
        """Write one argument; False where the text was cut off in it."""
        key = opened["key"].strip().strip("\"'")
        # Of two arguments with one key the first counts: nobody sees what the other writes.
        writer = CallWriter(self._context) if key in self._keys else self._writer
        prefix = f'{", " if self._keys else ""}"{json_text(key)}": '
        told = opened.groupdict().get("text") if self._form.typed else None
        value = _Value(self._context.tools, writer, self._form, (self._name, key), prefix)
        if told is not None:
            value.is_text = told in ("true", "string")
            value.is_json = not value.is_text
        self._keys.add(key)
        value_end, depth = self._form.value_end.format(key), 0
        inner = f"{self._form.key[0]}{key}>" if self._form.unfold else ""  # of the same name
        ends = Marks(value_end, inner, *self._ends)
        while True:
            mark = yield from self._context.buffer.scan(ends, value.write)
            depth += (mark == inner) - (mark == value_end)
            if mark and (
                (inner and mark in (inner, value_end) and depth >= 0)
                or not (yield from self._is_end(mark, value_end))
            ):
                value.write(mark)
                continue
            if not mark and not self._context.buffer.is_complete:
                return False
            break
        if mark != value_end:
            self._context.buffer.at -= len(mark)
        value.end()
        return True

    def _is_end(self, mark: str, value_end: str) -> ParserSteps[bool]:
        """Return, by what follows, whether a mark that was read ends the argument or is quoted.

        The argument's own mark may be missing.
        """
        buffer, form, context = self._context.buffer, self._form, self._context
        if mark == form.begins and mark != value_end:
            opened = yield from buffer.match(form.opens, -len(mark))
            key = opened["key"].strip().strip("\"'") if opened else ""
            return key not in self._keys and key in context.tools.arguments(self._name)
        followers = {
            value_end: (form.begins, form.call_end, *context.marks),
            form.call_end: (context.end,),
        }.get(mark, (context.start,))
        offset = yield from buffer.run(_BLANKS)
        if not (yield from buffer.peek(offset)):
            return True
        for follower in followers:
            if (yield from buffer.starts(follower, offset)):
                return True
        return False


class _Value:
    """Writes one argument: as it comes where it can only be a text, or else at its end."""

    def __init__(
        self,
        tools: RequestTools,
        writer: CallWriter,
        form: TagForm,
        argument: tuple[str, str],
        prefix: str,
    ) -> None:
        """`argument` is the tool's name and the key; `prefix` stands in front of the value."""
        self._writer = writer
        self._tools = tools
        self._form = form
        self._argument = argument
        self.is_text = tools.is_text(*argument)
        self.is_json = False  # whatever the schema says
        self._texts: list[str] = []  # of what is read at its end
        self._text = ""  # of what is written as it comes, and was not yet
        self._prefix: str | None = prefix  # None = it was written

    def write(self, text: str) -> None:
        """Take the next piece of the value."""
        if not self.is_text:
            self._texts.append(text)
            return
        self._text += text
        if self._prefix is not None:
            begun = self._led(self._text)
            if not begun or _CDATA.startswith(begun.lstrip()[: len(_CDATA)]):
                return  # it is not known where the value begins
            self._writer.write(self._prefix + '"')
            self._prefix, self._text = None, begun
        body = self._trailed(self._text)
        self._writer.write(json_text(body))
        self._text = self._text[len(body) :]

    def end(self) -> None:
        """End the value."""
        if self._prefix is None:
            self._writer.write('"')
            return
        text = self._trailed(self._led(self._text or "".join(self._texts)))
        if found := _CDATA_SECTION.fullmatch(text):
            text = found[1]
        unfold, guesses = self._form.unfold, self._form.guesses_types
        fitting = (
            unfold(self._tools, *self._argument, text)
            if unfold
            else self._tools.fitting(*self._argument, text, guesses=guesses)
        )
        self._writer.write(self._prefix + ((self.is_json and as_json(text)) or fitting))

    def _led(self, text: str) -> str:
        return text.removeprefix("\n") if self._form.trims_newline else text

    def _trailed(self, text: str) -> str:
        return text.removesuffix("\n") if self._form.trims_newline else text
