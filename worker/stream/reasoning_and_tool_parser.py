"""Parses an answer whose think blocks and tool calls stand between marks."""

from dataclasses import dataclass, replace
from typing import Final

import regex

from hearth.worker.stream.answer_parts import (
    AnswerCollector,
    Channel,
    ContentWriter,
    ReasoningWriter,
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


class _CallCollector(AnswerCollector):
    """Collects calls that nothing else stands beside. Owner: the inference thread."""

    def text(self, channel: Channel, text: str, behind: int = 0) -> None:
        raise UnreadableOutput


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
        self._call_count = 0
        self._reread_chars = 0
        self._may_close = not options.is_thinking  # a closing mark may be an orphan
        self._has_opened = False  # a mark that would begin thinking was written as content

    def read(self) -> ParserSteps[None]:
        """Parse all of the answer."""
        self._content.is_fresh = not self._options.is_continued
        if self._content.is_fresh:
            yield from self._opening()
        yield from self._answer()

    def _answer(self) -> ParserSteps[None]:
        start, end, dropped = self._marks.think_start, self._marks.think_end, self._marks.dropped
        call_ends = [each.end for each in self._sections.values()]
        marks = Marks(start, end, *dropped, *call_ends, *self._sections)
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
            elif mark == end and not self._has_opened and not (yield from self._quotes()):
                if self._may_close:
                    self._content.begin_answer()
                self._may_close = False
            elif mark not in dropped and not (
                mark in call_ends and self._call_count and self._content.is_fresh
            ):
                self._may_close, self._has_opened = False, mark == start
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
        elif self._options.may_think:
            starts = Marks(*self._sections).pattern
            if not (yield from self._buffer.match(starts, blanks)):
                yield from self._think_block(is_certain=False)

    def _think_block(self, is_certain: bool = True) -> ParserSteps[None]:
        """Read a think block behind its mark; one that never closes is all there is.

        The model's last calls end it, too. Not `is_certain`: nobody opened it; without any end of a
        block in the answer it is none up to the first mark of a call, or all of it is content.
        """
        self._may_close = False
        buffer, end, begin, decided = self._buffer, self._marks.think_end, self._buffer.position, 0
        marks = Marks(end, *self._sections)
        buffer.keeps_all = not is_certain
        while (mark := (yield from buffer.scan(marks, self._reasoning.write))) not in ("", end):
            if buffer.position > decided:
                decided = yield from self._calls_of_thought(len(mark))
            is_certain = is_certain or (yield from self._closes())
            if not is_certain or not decided:
                break
            self._reasoning.write(mark)
        self._reasoning.end()
        if mark == end:
            self._content.begin_answer()
        elif mark:
            buffer.at -= len(mark)
        elif not is_certain and buffer.is_complete:
            self._back_to(begin)
        buffer.keeps_all = False

    def _calls_of_thought(self, back: int) -> ParserSteps[int]:
        """Return up to where calls `back` characters before here, amid thinking, are thoughts.

        That is 0 where they are to be made: whole calls of offered tools, and behind them the
        answer ends, or the block and more calls follow. With more thinking behind them they were
        thoughts; with content behind the block, too: who thought of a call and then answered went
        without. One that is made again was a draft. Nothing is told, and nothing is read.
        """
        buffer, kept, here = self._buffer, self._buffer.keeps_all, self._buffer.position
        buffer.keeps_all = True
        buffer.at -= back
        collector, options = _CallCollector(buffer), replace(self._options, is_thinking=False)
        parser = ReasoningAndToolParser(self._marks, options, buffer, collector)
        try:
            yield from parser._answer()
            decided = here if self._are_made(collector, here - back) else 0
        except UnreadableOutput:
            decided = buffer.position
        self._back_to(here)
        buffer.keeps_all = kept
        return decided

    def _are_made(self, collector: AnswerCollector, begin: int) -> bool:
        """Return whether all that was read from `begin` on are whole calls, to be made."""
        marks, calls = self._marks, collector.parts.calls
        text = self._buffer.since(begin).rstrip().removesuffix(marks.think_end).rstrip()
        call_ends = filter(None, (form.call_end for form in marks.forms))
        is_ended = text.endswith((*(each.end for each in self._sections.values()), *call_ends))
        # An argument that runs beyond the block up to another call: the first was broken off.
        starts = Marks(*self._sections).pattern.pattern
        anew = rf"{regex.escape(marks.think_end)}(?:\s|\\n)*+(?:{starts})"
        return (
            is_ended
            and len({str(call) for call in calls}) == len(calls) > 0
            and all(self._options.tools.known(call.name) for call in calls)
            and all(isinstance(call.arguments, dict) for call in calls)
            and not regex.search(anew, str(calls))
        )

    def _closes(self) -> ParserSteps[bool]:
        """Return whether a mark that ends a think block is still to come."""
        begin = self._buffer.position
        mark = yield from self._buffer.scan(Marks(self._marks.think_end), lambda text: None)
        self._back_to(begin)
        return bool(mark)

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
        blanks = yield from self._buffer.run(_BLANKS)
        if not section.is_head and (yield from self._buffer.starts(section.start, blanks)):
            self._buffer.at += blanks + len(section.start)  # the mark is doubled
        try:
            yield from section.read(self._call_context(section))
        except UnreadableOutput:
            self._rewind()
            if count == self._call_count:
                self._buffer.at += len(section.start)
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
