"""Parses an answer whose think blocks and tool calls stand between marks."""

from dataclasses import dataclass, replace
from typing import Final

import regex

from hearth.worker.stream.answer_parts import (
    AnswerCollector,
    ContentWriter,
    ReasoningWriter,
    ToolCall,
)
from hearth.worker.stream.lookahead_buffer import (
    LookaheadBuffer,
    Marks,
    ParserSteps,
    UnreadableOutput,
)
from hearth.worker.stream.tool_calls.call_parser import Section
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import Trust, json_calls
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm

# Of failed calls in one answer, that are read again as text: a model that repeats itself.
REREAD_CHARS_MAX: Final = 1_000_000
_BLANKS: Final = regex.compile(r"\s*+")
_FENCE: Final = regex.compile(r"```(?:json)?+\s++(?=\S)")


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """The marks that one model writes. Immutable."""

    think_start: str = ""
    think_end: str = ""
    sections: tuple[Section, ...] = ()  # in which calls stand
    forms: tuple[TagForm, ...] = ()  # of calls that are elements, the model's own first
    dropped: tuple[str, ...] = ()  # marks that only frame the content


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The facts of a request that decide how its answer is parsed. Immutable."""

    tools: RequestTools
    is_thinking: bool  # the prompt left a think block open
    may_think: bool  # the model may begin with a think block that nobody opened
    takes_calls: bool
    is_continued: bool  # the prompt ends amid content


class ReasoningAndToolParser:
    """Parses one answer. Owner: the inference thread.

    Invariant: what turns out to be no call is content, exactly as it was written.
    """

    def __init__(
        self,
        output_marks: OutputMarks,
        options: AnswerOptions,
        buffer: LookaheadBuffer,
        collector: AnswerCollector,
    ) -> None:
        self._marks = output_marks
        self._options = options
        self._buffer = buffer
        self._collector = collector
        self._reasoning = ReasoningWriter(collector)
        self._content = ContentWriter(collector)
        sections = output_marks.sections if options.takes_calls else ()
        self._sections = {each.start: each for each in sections}
        self._starts, end = Marks(*self._sections), output_marks.think_end
        self._ends = Marks(end, *(each.end for each in sections))
        self._call_ends = (*filter(None, (form.call_end for form in output_marks.forms)),)
        # A call behind the end of the block: what stood in front of that was broken off.
        self._restart = regex.compile(rf"{regex.escape(end)}\s*+(?:{self._starts.pattern.pattern})")
        self._call_count = 0
        self._reread_chars = 0
        self._may_close = not options.is_thinking  # a closing mark may be an orphan

    def read(self) -> ParserSteps[None]:
        """Parse all of the answer."""
        self._content.is_fresh = not self._options.is_continued
        if self._content.is_fresh:
            yield from self._opening()
        start, end, dropped = self._marks.think_start, self._marks.think_end, self._marks.dropped
        marks = Marks(start, end, *dropped, *self._sections)
        while True:
            if self._content.is_fresh and (yield from self._bare_calls()):
                continue
            mark = yield from self._buffer.scan(marks, self._content.write)
            if not mark:
                break
            if mark in self._sections:
                yield from self._calls(self._sections[mark])
            elif mark == start and self._content.is_fresh:
                yield from self._think_block()
            elif mark == end and not (yield from self._quotes()):
                if self._may_close:
                    self._content.begin_answer()
                self._may_close = False
            elif mark not in dropped:
                self._may_close = False
                self._content.write(mark)
        self._content.end()

    # ------------------------------------------------------------ think blocks

    def _opening(self) -> ParserSteps[None]:
        """Read the think block that the answer is to begin with."""
        start = self._marks.think_start
        if not start:
            return
        blanks = yield from self._buffer.run(_BLANKS)
        if (yield from self._buffer.starts(start, blanks)):
            self._buffer.at += blanks + len(start)
            yield from self._think_block()
        elif self._options.is_thinking:
            yield from self._think_block()
        elif self._options.may_think and not (yield from self._buffer.mark(self._starts, blanks)):
            yield from self._think_block(is_certain=False)

    def _think_block(self, is_certain: bool = True) -> ParserSteps[None]:
        """Read a think block behind its mark; one that never closes is all there is.

        The model's last calls end it, too. Not `is_certain`: nobody opened it; without any end of a
        block in the answer it is none up to the first mark of a call, or all of it is content.
        """
        self._may_close = False
        buffer, end, begin = self._buffer, self._marks.think_end, self._buffer.position
        marks = Marks(end, *self._sections)
        buffer.keeps += not is_certain
        while True:
            mark = yield from buffer.scan(marks, self._reasoning.write)
            if mark in ("", end) or (yield from self._are_last(mark)):
                break
            is_certain = is_certain or (yield from self._closes())
            if not is_certain:
                break
            self._reasoning.write(mark)
        self._reasoning.end()
        if mark == end:
            self._content.begin_answer()
        elif mark:
            buffer.at -= len(mark)
        elif not is_certain and buffer.is_complete:
            self._back_to(begin)
        buffer.keeps = 0

    def _closes(self) -> ParserSteps[bool]:
        """Return whether a mark that ends a think block is still to come."""
        begin = self._buffer.position
        mark = yield from self._buffer.scan(Marks(self._marks.think_end), lambda text: None)
        self._back_to(begin)
        return bool(mark)

    def _are_last(self, mark: str) -> ParserSteps[bool]:
        """Return whether the calls behind the mark that was read, amid thinking, are to be made.

        Then the answer ends behind them, or the block and more calls follow. With more thinking
        behind them they were a thought, and with content behind the block, too: who thought of a
        call and then answered did without. One that is made again behind the block was a draft.
        Nothing is told, and nothing is read.
        """
        begin, is_closed = self._buffer.position, False
        calls: list[ToolCall] = []
        self._buffer.keeps += 1
        while mark in self._sections:
            made = yield from self._whole_calls(self._sections[mark])
            if is_closed or not made:
                break
            calls += made
            is_closed = yield from self._stray_ends()
            yield from self._buffer.skip(_BLANKS)
            mark = yield from self._buffer.mark(self._starts)
            self._buffer.at += len(mark)
        is_over = not mark and not (yield from self._buffer.peek())
        self._back_to(begin)
        self._buffer.keeps -= 1
        return bool(calls) and (is_over or (is_closed and bool(mark) and made[:1] != calls[:1]))

    def _whole_calls(self, section: Section) -> ParserSteps[list[ToolCall]]:
        """Return the calls behind a mark that was read; none unless all are well-formed.

        They are read up to their end's mark, and are of offered tools. Nothing is told.
        """
        begin, collector = self._buffer.position, AnswerCollector(self._buffer)
        context = replace(self._call_context(section), collector=collector, on_call=lambda: None)
        self._buffer.at -= len(section.start) if section.is_head else 0
        try:
            yield from section.read(context)
        except UnreadableOutput:
            return []
        text, calls = self._buffer.since(begin), [*collector.parts.calls]
        is_known = all(self._options.tools.known(call.name) for call in calls)
        is_whole = all(isinstance(call.arguments, dict) for call in calls)
        is_whole &= text.endswith((section.end, *self._call_ends))
        return calls if is_known and is_whole and not self._restart.search(text) else []

    def _stray_ends(self) -> ParserSteps[bool]:
        """Skip marks that end what has ended; return whether a think block's was among them."""
        closes, mark = False, "-"
        while mark:
            blanks = yield from self._buffer.run(_BLANKS)
            mark = yield from self._buffer.mark(self._ends, blanks)
            closes |= mark == self._marks.think_end
            self._buffer.at += blanks + len(mark) if mark else 0
        return closes

    def _back_to(self, begin: int) -> None:
        """Go back to where `begin` characters were read."""
        self._buffer.hold(back=self._buffer.position - begin)
        self._rewind()

    def _quotes(self) -> ParserSteps[bool]:
        """Return whether the mark that was read stands between quotation marks."""
        before = self._buffer.before(len(self._marks.think_end))
        return before in ("`", '"', "'") and (yield from self._buffer.starts(before))

    # ------------------------------------------------------------ calls

    def _call_context(self, section: Section) -> CallContext:
        return CallContext(
            self._buffer,
            self._collector,
            self._options.tools,
            self._begin_call,
            section.start,
            section.end,
            section.is_own,
            self._marks.forms,
            section.quote,
        )

    def _begin_call(self) -> None:
        self._call_count += 1
        self._may_close = False
        self._content.begin_call()

    def _calls(self, section: Section) -> ParserSteps[None]:
        """Read the calls behind a mark that was read; what is none is content as written."""
        assert section.start, "calls stand behind a mark"
        count = self._call_count
        self._buffer.hold(back=len(section.start))
        self._buffer.at -= len(section.start) if section.is_head else 0
        try:
            yield from section.read(self._call_context(section))
            yield from self._stray_ends()
        except UnreadableOutput:
            self._rewind()
            if count == self._call_count:
                self._buffer.at += len(section.start)
                blanks = yield from self._buffer.run(_BLANKS)
                if not (yield from self._buffer.mark(self._starts, blanks)):  # it is not doubled
                    self._content.write(section.start)
        self._buffer.release()

    def _rewind(self) -> None:
        self._reread_chars += self._buffer.rewind()
        if self._reread_chars > REREAD_CHARS_MAX:
            self._sections = {}

    def _bare_calls(self) -> ParserSteps[bool]:
        """Read calls in JSON that nothing marks, where the answer begins; False if there are none.

        Only of tools of the request: any other object is an answer. They may stand in a fence.
        """
        if not self._sections or not self._options.tools:
            return False
        blanks = yield from self._buffer.run(_BLANKS)
        fence = yield from self._buffer.match(_FENCE, blanks)
        blanks += len(fence[0]) if fence else 0
        if (yield from self._buffer.peek(blanks)) != "{":
            return False
        count = self._call_count
        self._buffer.hold()
        self._buffer.at += blanks
        try:
            yield from json_calls(
                self._call_context(Section("")), Trust(any_name=False, any_order=False)
            )
        except UnreadableOutput:
            self._rewind()
        self._buffer.release()
        is_call = self._call_count > count
        if is_call and fence:
            blanks = yield from self._buffer.run(_BLANKS)
            if (yield from self._buffer.starts("```", blanks)):
                self._buffer.at += blanks + 3
        return is_call
