"""Parses calls in elements, as `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

A value is plain text; the tool's schema has its type. mlx-lm's parser of the format reads it, one
argument at a time; an argument that can only be a text is written as it comes.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import regex

from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_writer import CallContext, CallWriter
from hearth.worker.stream.tool_calls.json_calls import named_call
from hearth.worker.stream.tool_calls.lenient_json import json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.upstream_parsers import UpstreamParser, calls_in, of_mlx_lm

_BLANKS: Final = regex.compile(r"(?:\s|\\n)*+")  # GLM also spells newlines out
_NULL: Final = "null"
_CDATA: Final = "<![CDATA["


@dataclass(frozen=True, slots=True)
class XmlForm:
    """The form in which a family of models writes a call, from `head` on. Immutable.

    `head` has the group "name", `opens` begins an argument and has the group "key".
    """

    parser: str  # mlx-lm's module
    head: Any
    begins: str  # what every match of `opens` begins with
    opens: Any
    closes: str
    tail: str = ""  # ends a call; "" where the mark behind calls does
    begins_value: str = ""  # what a match of `opens` should end with
    # What may stand around arguments that are one JSON object.
    json_opens: Any = regex.compile(r"(?=\{)")
    json_closes: str = ""
    trims_newline: bool = False  # of a value: one at each end, or else all blanks


def _named(what: str, attribute: str) -> Any:
    """Return the pattern of a tag whose attribute is the name or the key."""
    group = "key" if "param" in what or "argument" in what else "name"
    value = rf"(?P<{group}>\"[^\"<>\n]*+\"|'[^'<>\n]*+'|[^\s\"'<>|]++)"
    return regex.compile(rf"{what}\s+{attribute}\s*=\s*{value}[^<>]*+>")


_XTML: Final = r"<\|open\|>{} (?:[^<>]*? )??{}=\"(?P<{}>[^\"<>]*+)\"[^<>]*+<\|sep\|>"
FORMS: Final = (
    XmlForm(
        "qwen3_coder",
        regex.compile(r"<(?P<tag>function|parameter)\s*=\s*(?P<name>[^\s<>]++)\s*(?:>|(?=<))"),
        "<parameter=",
        regex.compile(r"<parameter=\s*(?P<key>[^\s<>]++)\s*>"),
        "</parameter>",
        "</function>",
        trims_newline=True,
    ),
    XmlForm(
        "minimax_m2",
        _named("<invoke", "name"),
        "<parameter ",
        _named("<parameter", "name"),
        "</parameter>",
        "</invoke>",
    ),
    XmlForm(
        "minicpm5",
        _named("<function", "name"),
        "<param ",
        _named("<param", "name"),
        "</param>",
        "</function>",
    ),
    XmlForm(
        "muse_spark",
        _named("<atem:invoke", "name"),
        "<atem:parameter ",
        _named("<atem:parameter", "name"),
        "</atem:parameter>",
        "</atem:invoke>",
    ),
    XmlForm(
        "kimi_k3",
        regex.compile(_XTML.format("call", "tool", "name")),
        "<|open|>argument ",
        regex.compile(_XTML.format("argument", "key", "key")),
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        json_opens=regex.compile(r"<\|open\|>json[^<>]*+<\|sep\|>"),
        json_closes="<|close|>json<|sep|>",
    ),
)
# Whose name stands alone in front of the first argument.
BARE_FORMS: Final = tuple(
    XmlForm(
        parser,
        regex.compile(r"(?P<name>[^\s<>{}\[\]()\"'=,]++)"),
        f"<{prefix}arg_key>",
        regex.compile(
            rf"<{prefix}arg_key>(?P<key>[^<]*+)</{prefix}arg_key>(?:\s|\\n)*+"
            rf"(?:<{prefix}arg_value>|(?=[^<\s\\]))"  # which GLM may leave out
        ),
        f"</{prefix}arg_value>",
        begins_value=f"<{prefix}arg_value>",
    )
    for parser, prefix in (("glm47", ""), ("longcat", "longcat_"))
)


def element_call(context: CallContext, form: XmlForm, head: Any) -> ParserSteps[None]:
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
        for mark in (form.json_closes, form.tail):
            blanks = yield from context.buffer.run(_BLANKS)
            if (yield from context.buffer.starts(mark, blanks)):
                context.buffer.at += blanks + len(mark)
        return
    if context.tools.known(name):
        writer.open(name)
    writer.write("{")
    yield from _Arguments(context, form, head[0], writer, context.tools.known(name) or name).read()


class _Arguments:
    """Parses the arguments of one call."""

    def __init__(
        self, context: CallContext, form: XmlForm, head: str, writer: CallWriter, name: str
    ) -> None:
        self._context = context
        self._form = form
        self._head = head
        self._writer = writer
        self._name = name
        self._keys: set[str] = set()
        # What an argument may end at, and what may stand between two.
        self._ends = Marks(form.closes, form.begins, form.tail, context.end)
        self._between = Marks(form.begins, form.tail, *context.marks)

    def read(self) -> ParserSteps[None]:
        """Read all arguments and what ends the call, except for the mark behind calls.

        Raises UnreadableOutput where it is no call.
        """
        buffer, form = self._context.buffer, self._form
        while True:
            skipped: list[str] = []
            mark = yield from buffer.scan(self._between, skipped.append)
            if "".join(skipped).replace("\\n", "").strip() and not self._writer.is_open:
                raise UnreadableOutput
            if mark != form.tail:
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
        value = _Value(self._context.tools, writer, self._form, (self._name, key), prefix)
        self._keys.add(key)
        while True:
            mark = yield from self._context.buffer.scan(self._ends, value.write)
            if mark and not (yield from self._is_end(mark)):
                value.write(mark)
                continue
            if not mark and not self._context.buffer.is_complete:
                return False
            break
        if mark != self._form.closes:
            self._context.buffer.at -= len(mark)
        value.end(self._head, opened[0].removesuffix(self._form.begins_value))
        return True

    def _is_end(self, mark: str) -> ParserSteps[bool]:
        """Return, by what follows, whether a mark that was read ends the argument or is quoted.

        The argument's own mark may be missing.
        """
        buffer, form, context = self._context.buffer, self._form, self._context
        if mark == form.begins and mark != form.closes:
            opened = yield from buffer.match(form.opens, -len(mark))
            key = opened["key"].strip().strip("\"'") if opened else ""
            return key not in self._keys and key in context.tools.arguments(self._name)
        followers = {
            form.closes: (form.begins, form.tail, *context.marks),
            form.tail: (context.end,),
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
        form: XmlForm,
        argument: tuple[str, str],
        prefix: str,
    ) -> None:
        """`argument` is the tool's name and the key; `prefix` stands in front of the value."""
        self._writer = writer
        self._tools = tools
        self._form = form
        self._argument = argument
        self._is_text = tools.is_text(*argument)
        self._texts: list[str] = []  # of what is read at its end
        self._text = ""  # of what is written as it comes, and was not yet
        self._prefix: str | None = prefix  # None = it was written

    def write(self, text: str) -> None:
        """Take the next piece of the value."""
        if not self._is_text:
            self._texts.append(text)
            return
        self._text += text
        if self._prefix is not None:
            begun = self._led(self._text)
            if _NULL.startswith(begun.strip().lower()) or _are_alike(begun, _CDATA):
                return  # that a parser reads as something else
            self._writer.write(self._prefix + '"')
            self._prefix, self._text = None, begun
        body = self._trailed(self._text)
        self._writer.write(json_text(body))
        self._text = self._text[len(body) :]

    def end(self, head: str, opened: str) -> None:
        """End the value; `head` begins the call, `opened` the argument."""
        if self._prefix is None:
            self._writer.write('"')
            return
        form, written = self._form, self._text or "".join(self._texts)
        text = self._trailed(self._led(written))
        value: Any = text
        if form.closes not in written:
            opened += form.begins_value
            whole = f"{head}{opened}{written}{form.closes}{form.tail}"
            found = calls_in(_parser(form.parser), whole, self._tools)
            given = found[0].arguments if len(found) == 1 else None
            if isinstance(given, dict) and len(given) == 1:
                (value,) = given.values()
        self._writer.write(self._prefix + self._tools.fitting(*self._argument, value, text))

    def _led(self, text: str) -> str:
        return text.removeprefix("\n") if self._form.trims_newline else text.lstrip()

    def _trailed(self, text: str) -> str:
        return text.removesuffix("\n") if self._form.trims_newline else text.rstrip()


def _are_alike(text: str, mark: str) -> bool:
    """Return whether `text` begins with `mark`, or still may."""
    return text.startswith(mark) or mark.startswith(text)


@cache
def _parser(name: str) -> UpstreamParser:
    return of_mlx_lm(name)
