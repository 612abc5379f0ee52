"""The format of gpt-oss, harmony: a turn is a sequence of messages with channels.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The recipient stands after the channel or after the role. The prompt ends with
`<|start|>assistant`, so a generated text begins within the header of its first message.
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
# The beginnings of a header without its start mark:
_HEADER_BEGINS: Final = (CHANNEL, MESSAGE, "<|constrain|>", "to=", "assistant", *_BOUNDARIES)
_BLANKS: Final = regex.compile(r"\s*+")
_CHANNEL_NAME = re.compile(r"\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NOT_FUNCTIONS = frozenset({"user", "assistant", "all"})  # recipients that are no tools


class HarmonyParser:
    """Parses one answer. Owner: the inference thread.

    Text outside of any message is content: the model has left the format. A header without a
    message is dropped. A message begins a new line if a message of the same channel came before.
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
        self._channels_used: set[Channel] = set()  # channels that have text

    def read(self, begun: Channel | None) -> ParserSteps[None]:
        """Parse all of the answer; `begun` is the channel of a message that the prompt began."""
        mark = (yield from self._text(begun)) if begun else ""
        while True:
            if mark == START or (yield from self._is_header()):
                mark = yield from self._message()
            else:
                mark = yield from self._text("content")
            if not mark:
                return

    def _is_header(self) -> ParserSteps[bool]:
        """Return whether a header without its start mark stands here."""
        blanks = yield from self._buffer.offset_after(_BLANKS)
        if (yield from self._buffer.starts_any(_HEADER_BEGINS, blanks)):
            return True
        return not (yield from self._buffer.peek(blanks))

    def _message(self) -> ParserSteps[str]:
        """Read a message from its header on, and return the mark after it."""
        header, mark = yield from self._buffer.text_up_to(_HEADER_ENDS)
        if mark != MESSAGE:
            return mark
        name = _function_called(header) if self._takes_calls else ""
        if name:
            return (yield from self._call(name))
        is_analysis = _channel(header) == "analysis"
        return (yield from self._text("reasoning" if is_analysis else "content"))

    def _text(self, channel: Channel) -> ParserSteps[str]:
        """Collect the text of a message, and return the mark after it."""
        is_first = True

        def write(text: str) -> None:
            nonlocal is_first
            begins_line = is_first and channel in self._channels_used
            self._collector.text(channel, f"\n{text}" if begins_line else text)
            self._channels_used.add(channel)
            is_first = False

        while (mark := (yield from self._buffer.scan(_TEXT_ENDS, write))) in _HEADER_MARKS:
            if mark == CHANNEL and (yield from self._buffer.match(_KIND)):
                self._buffer.at -= len(mark)  # the message before it has no end mark
                return mark
        return mark

    def _call(self, name: str) -> ParserSteps[str]:
        """Collect the call of `name`, and return the mark after it."""
        name = self._tools.known_name(name) or name
        # A text that is no object becomes the argument of a tool whose only argument is a text.
        sole = self._tools.sole_text(name)
        collector, transcoder = self._collector, Transcoder()
        waiting, kind = "", ""  # text that waits until its kind is certain

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
    """Return the channel in a header, "" without one."""
    _, _, rest = header.partition(CHANNEL)
    found = _CHANNEL_NAME.match(rest)
    return found[1] if found else ""


def _function_called(header: str) -> str:
    """Return the name of the tool that a message calls, "" if it calls none.

    A message to a recipient in the namespace `functions` is a call on any channel. A message to
    another recipient, for example a built-in tool, is a call on the commentary channel only.
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
    """Parse one answer; `begun` is the channel of a message that the prompt began."""
    return HarmonyParser(buffer, collector, tools, takes_calls).read(begun)


# ---------------------------------------------------------------- the grammar


def final_message(lark: Lark, answer: Expression) -> Expression:
    """Return the message with the text `answer`."""
    kind = lark.any_of([*TYPE, NOTHING])
    return lark.concat(f"{CHANNEL}final", kind, MESSAGE, answer)


def call_message(lark: Lark, tools: Sequence[ToolSchema], _: bool = False) -> Expression:
    """Return the message that calls one of the tools."""
    assert tools, "a call needs a tool"
    return lark.any_of([_call(lark, tool) for tool in tools])


def addressed_call(lark: Lark, tools: Sequence[ToolSchema], _: bool = False) -> Expression:
    """Return a call from its recipient on, before or after the channel."""
    assert tools, "a call needs a tool"
    kind = lark.any_of([*TYPE, NOTHING])
    channel = lark.optional(f"{CHANNEL}commentary")
    rest = lark.rule(lark.concat(channel, kind, MESSAGE))
    calls = [
        lark.concat(lark.quoted(tool.name), rest, json_arguments(lark, tool)) for tool in tools
    ]
    return lark.concat(RECIPIENT, lark.any_of(calls))


def _call(lark: Lark, tool: ToolSchema) -> Expression:
    kind = lark.any_of([*TYPE, NOTHING])
    recipient = lark.concat(RECIPIENT, lark.quoted(tool.name))
    channel = f"{CHANNEL}commentary"
    header = lark.any_of([lark.concat(channel, recipient), lark.concat(recipient, channel)])
    return lark.concat(header, kind, MESSAGE, json_arguments(lark, tool))


def turn(lark: Lark, last: Expression, opening: str) -> Expression:
    """Return a turn of thinking messages and, at its end, `last`.

    `opening` is the generation prompt, which may have begun the thinking.
    """
    thinking = lark.repeated(ANALYSIS, lark.optional(TEXT), NEXT)
    if opening.endswith(ANALYSIS):
        return lark.concat(lark.optional(TEXT), NEXT, thinking, last)
    return lark.concat(thinking, last)


FORMATS = (
    ModelFormat(
        matches=lambda words: words.vocabulary >= MARKS,
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
