"""Writes one call to the collector, and holds it back until it is certain that it is one."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from hearth.shared.written_numbers import object_or_text
from hearth.worker.stream.answer_parts import AnswerCollector, ToolCall
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, UnreadableOutput
from hearth.worker.stream.tool_calls.lenient_json import json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm


@dataclass(frozen=True, slots=True)
class CallContext:
    """What all functions share that parse calls. Owner: the inference thread."""

    buffer: LookaheadBuffer
    collector: AnswerCollector
    tools: RequestTools
    on_call: Callable[[], None]  # runs before each call is written
    start: str  # the mark in front of calls, "" = there is none
    end: str  # the mark behind them, "" = there is none
    is_own: bool  # the mark is the model's own: also calls of no tool of the request stand there
    forms: tuple[TagForm, ...]  # of elements, the model's own first
    quote: str  # around strings in which nothing is escaped, "" = there is none

    def write(self, name: str, arguments: str, call_id: str = "") -> None:
        """Write a call that is whole: with a JSON object, or a text that is none.

        A text is the argument of a tool that takes one only, and that a text.
        """
        writer = CallWriter(self, call_id)
        sole = self.tools.sole_text(name)
        if sole and isinstance(object_or_text(arguments), str):
            arguments = f'{{"{json_text(sole)}": "{json_text(arguments)}"}}'
        writer.write(arguments)
        writer.open(name)

    def write_all(self, calls: list[ToolCall]) -> None:
        """Write calls that a parser found."""
        for call in calls:
            given = call.arguments
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            self.write(call.name, text)

    @property
    def marks(self) -> tuple[str, str]:
        """The marks that end a call outside of its strings."""
        return self.end, self.start


class CallWriter:
    """Writes one call. Owner: the inference thread.

    Invariant: nothing reaches the collector before the call is open, and it opens once.
    """

    def __init__(self, context: CallContext, call_id: str = "") -> None:
        self.call_id = call_id  # as the model wrote it
        self.is_open = False
        self._texts: list[str] = []
        self._context = context

    @property
    def text(self) -> str:
        """The text that was written before the call was open."""
        return "".join(self._texts)

    def open(self, name: str, *, is_id: bool = False) -> None:
        """Take it for a call of the tool `name`, or of the one that is meant where that `is_id`.

        Raises UnreadableOutput for an empty name.
        """
        assert not self.is_open
        name = self._context.tools.meant(name, self.text, is_id=is_id)
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
