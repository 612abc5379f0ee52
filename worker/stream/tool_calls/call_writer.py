"""Where one call is written: held back until it is certain that it is one."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from hearth.worker.stream.answer_parts import AnswerCollector, ToolCall, object_or_text
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, UnreadableOutput
from hearth.worker.stream.tool_calls.lenient_json import json_text
from hearth.worker.stream.tool_calls.request_tools import RequestTools


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the readers of calls share."""

    source: LookaheadBuffer
    delivery: AnswerCollector
    tools: RequestTools
    begins: Callable[[], None]  # is told of each call before it is delivered
    start: str  # the mark in front of calls, "" = there is none
    end: str  # the mark behind them, "" = there is none

    def deliver(self, name: str, arguments: str) -> None:
        """Deliver a call that is whole: with a JSON object, or a text that is none.

        A text is the argument of a tool that takes one only, and that a text.
        """
        pen = CallWriter(self)
        sole = self.tools.sole_text(name)
        if sole and isinstance(object_or_text(arguments), str):
            arguments = f'{{"{json_text(sole)}": "{json_text(arguments)}"}}'
        pen.write(arguments)
        pen.open(name)

    def deliver_all(self, calls: list[ToolCall]) -> None:
        """Deliver calls that a parser found."""
        for call in calls:
            given = call.arguments
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            self.deliver(call.name, text)

    @property
    def marks(self) -> tuple[str, str]:
        """What ends a call outside of its strings."""
        return self.end, self.start


class CallWriter:
    """Writes one call. What it writes goes out when the call is open."""

    def __init__(self, desk: CallContext) -> None:
        self.is_open = False
        self._texts: list[str] = []
        self._desk = desk

    @property
    def text(self) -> str:
        """What was written before it was open."""
        return "".join(self._texts)

    def open(self, name: str) -> None:
        """It is a call of the tool `name`. Raises Unreadable where that is nothing."""
        assert not self.is_open
        name = self._desk.tools.known(name) or name.strip()
        if not name:
            raise UnreadableOutput
        self.is_open = True
        self._desk.source.release()
        self._desk.begins()
        self._desk.delivery.call(name)
        self._desk.delivery.arguments(self.text)

    def write(self, text: str) -> None:
        """Write a piece of the arguments' JSON."""
        if self.is_open:
            self._desk.delivery.arguments(text)
        else:
            self._texts.append(text)
