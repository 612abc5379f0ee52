"""The form of gpt-oss, harmony: a turn is a row of messages with channels.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The recipient stands behind the channel or behind the role. The prompt ends with
`<|start|>assistant`, so the first message of a generated text begins with what follows that.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Sequence
from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    NOTHING,
    TEXT,
    AnswerCollector,
    Channel,
    Expression,
    Lark,
    LookaheadBuffer,
    Marks,
    MessageGrammar,
    ModelFormat,
    ParserSteps,
    RequestTools,
    ToolSchema,
    Transcoder,
    json_arguments,
    json_text,
)

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
MARKS: Final = frozenset({START, CHANNEL, MESSAGE})
ANALYSIS: Final = f"{CHANNEL}analysis{MESSAGE}"  # begins reasoning
NEXT: Final = "<|end|><|start|>assistant"
RECIPIENT: Final = " to=functions."
TYPE: Final = (" <|constrain|>json", "<|constrain|>json", " json")

_BOUNDARIES: Final = (START, "<|end|>", "<|call|>", "<|return|>")
_BODY_ENDS: Final = Marks(*_BOUNDARIES)
_HEADER_MARKS: Final = (CHANNEL, MESSAGE, "<|constrain|>")
_TEXT_ENDS: Final = Marks(*_BOUNDARIES, *_HEADER_MARKS)
_KIND: Final = regex.compile(r"(?:analysis|commentary|final)\b")
_HEADER_ENDS: Final = Marks(MESSAGE, *_BOUNDARIES)
# What a header begins with that has no start mark.
_HEADER_BEGINS: Final = (CHANNEL, MESSAGE, "<|constrain|>", "to=", "assistant", *_BOUNDARIES)
_BLANKS: Final = regex.compile(r"\s*+")
_CHANNEL_NAME = re.compile(r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NOT_FUNCTIONS = frozenset({"user", "assistant", "all"})  # whom a message may be for


class HarmonyParser:
    """Parses one answer. Owner: the inference thread.

    Text outside of any message is content: the model has left the format. A header whose message
    never begins is dropped. Messages of one kind stand on lines of their own.
    """

    def __init__(
        self,
        buffer: LookaheadBuffer,
        collector: AnswerCollector,
        tools: RequestTools,
        takes_calls: bool,
    ) -> None:
        self._buffer = buffer
        self._collector = collector
        self._tools = tools
        self._takes_calls = takes_calls
        self._channels_used: set[Channel] = set()  # those that have text

    def read(self, begun: Channel | None) -> ParserSteps[None]:
        """Parse all of the answer; `begun`: what the message is that the prompt has begun."""
        mark = (yield from self._text(begun)) if begun else ""
        while True:
            if mark == START or (yield from self._is_header()):
                mark = yield from self._message()
            else:
                mark = yield from self._text("content")
            if not mark:
                return

    def _is_header(self) -> ParserSteps[bool]:
        """Return whether a header stands here though no mark has begun it."""
        blanks = yield from self._buffer.run(_BLANKS)
        if (yield from self._buffer.starts_one(_HEADER_BEGINS, blanks)):
            return True
        return not (yield from self._buffer.peek(blanks))

    def _message(self) -> ParserSteps[str]:
        """Read a message from its header on, and return the mark behind it."""
        header, mark = yield from self._buffer.text_up_to(_HEADER_ENDS)
        if mark != MESSAGE:
            return mark
        name = _function_called(header) if self._takes_calls else ""
        if name:
            return (yield from self._call(name))
        is_analysis = _channel(header) == "analysis"
        return (yield from self._text("reasoning" if is_analysis else "content"))

    def _text(self, channel: Channel) -> ParserSteps[str]:
        """Collect the text of a message, and return the mark behind it."""
        is_first = True

        def write(text: str) -> None:
            nonlocal is_first
            begins_line = is_first and channel in self._channels_used
            self._collector.text(channel, f"\n{text}" if begins_line else text)
            self._channels_used.add(channel)
            is_first = False

        while (mark := (yield from self._buffer.scan(_TEXT_ENDS, write))) in _HEADER_MARKS:
            if mark == CHANNEL and (yield from self._buffer.match(_KIND)):
                self._buffer.at -= len(mark)  # the message in front of it was not ended
                return mark
        return mark

    def _call(self, name: str) -> ParserSteps[str]:
        """Collect the call of `name`, and return the mark behind it."""
        name = self._tools.known(name) or name
        # A text that is no object is the one argument of a tool that takes one text only.
        sole = self._tools.sole_text(name)
        collector, transcoder = self._collector, Transcoder()
        waiting, kind = "", ""  # what was not yet written, until it is clear what kind it is

        def write(text: str) -> None:
            nonlocal waiting, kind
            waiting += text
            if not kind and waiting.strip():
                collector.call(name)
                kind = "object" if waiting.lstrip().startswith("{") else "sole" if sole else "text"
                collector.arguments(f'{{"{json_text(sole)}": "' if kind == "sole" else "")
            if kind == "object":
                waiting = transcoder.feed(waiting)
            elif kind == "sole":
                waiting = json_text(waiting)
            if kind:
                collector.arguments(waiting)
                waiting = ""

        mark = yield from self._buffer.scan(_BODY_ENDS, write)
        is_complete = bool(mark) or self._buffer.is_complete
        if kind == "object":
            collector.arguments(transcoder.finish(is_complete))
        elif kind == "sole" and is_complete:
            collector.arguments('"}')
        elif not kind and is_complete:
            collector.call(name)
            collector.arguments("{}")
        return mark


def _channel(header: str) -> str:
    """Return the channel that a header names, "" if it names none."""
    _, _, behind = header.partition(CHANNEL)
    found = _CHANNEL_NAME.match(behind)
    return found[1] if found else ""


def _function_called(header: str) -> str:
    """Return the name of the tool that a message is for, "" if it is for none.

    A recipient in the namespace `functions` makes a call on any channel. Any other recipient, such
    as a built-in tool that nobody offered, makes one on the commentary channel only.
    """
    found = _RECIPIENT.search(header)
    recipient = found[1] if found else ""
    if recipient.startswith("functions."):
        return recipient.removeprefix("functions.")
    is_call = _channel(header) == "commentary" and recipient not in _NOT_FUNCTIONS
    return recipient if is_call else ""


def read(
    buffer: LookaheadBuffer,
    collector: AnswerCollector,
    tools: RequestTools,
    takes_calls: bool,
    begun: Channel | None,
) -> ParserSteps[None]:
    """Parse one answer; `begun`: what the message is that the prompt has begun."""
    return HarmonyParser(buffer, collector, tools, takes_calls).read(begun)


# ---------------------------------------------------------------- what a grammar holds it to


def final_message(lark: Lark, answer: Expression) -> Expression:
    """Return the message whose text is `answer`."""
    kind = lark.any_of([*TYPE, NOTHING])
    return lark.row(f"{CHANNEL}final", kind, MESSAGE, answer)


def call_message(lark: Lark, tools: Sequence[ToolSchema], _: bool = False) -> Expression:
    """Return the message that calls one of the tools."""
    assert tools, "a call needs a tool"
    return lark.any_of([_call(lark, tool) for tool in tools])


def addressed_call(lark: Lark, tools: Sequence[ToolSchema], _: bool = False) -> Expression:
    """Return a call from its recipient on, wherever in the header that stands."""
    assert tools, "a call needs a tool"
    kind = lark.any_of([*TYPE, NOTHING])
    channel = lark.optional(f"{CHANNEL}commentary")
    behind = lark.rule(lark.row(channel, kind, MESSAGE))
    calls = [lark.row(lark.quoted(each.name), behind, json_arguments(lark, each)) for each in tools]
    return lark.row(RECIPIENT, lark.any_of(calls))


def _call(lark: Lark, tool: ToolSchema) -> Expression:
    kind = lark.any_of([*TYPE, NOTHING])
    recipient = lark.row(RECIPIENT, lark.quoted(tool.name))
    channel = f"{CHANNEL}commentary"
    header = lark.any_of([lark.row(channel, recipient), lark.row(recipient, channel)])
    return lark.row(header, kind, MESSAGE, json_arguments(lark, tool))


def turn(lark: Lark, last: Expression, opening: str) -> Expression:
    """Return a turn that ends with `last`, with nothing but thinking in front of it.

    `opening` is the generation prompt, which may have begun the thinking.
    """
    thinking = lark.repeated(ANALYSIS, lark.optional(TEXT), NEXT)
    if opening.endswith(ANALYSIS):
        return lark.row(lark.optional(TEXT), NEXT, thinking, last)
    return lark.row(thinking, last)


FORMATS = (
    ModelFormat(
        is_of=lambda words: words.vocabulary >= MARKS,
        rank=-1,
        analysis=ANALYSIS,
        read=read,
        messages=MessageGrammar(
            mark=RECIPIENT,
            thinking=ANALYSIS,
            thinking_end="<|end|>",
            thinking_close=f"{NEXT}{CHANNEL}",
            again=ANALYSIS.removeprefix(CHANNEL),
            final_message=final_message,
            call_message=call_message,
            addressed_call=addressed_call,
            turn=turn,
        ),
    ),
)
