"""Parses an answer whose think blocks and tool calls stand between marks."""

from dataclasses import dataclass
from typing import Final

import regex

from hearth.worker.stream.answer_parts import AnswerCollector, ContentWriter, ReasoningWriter
from hearth.worker.stream.lookahead_buffer import (
    LookaheadBuffer,
    Marks,
    ParserSteps,
    UnreadableOutput,
)
from hearth.worker.stream.tool_calls.call_parser import Section, read_section
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import Trust, json_calls
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm

# Of failed calls in one answer, that are read again as text: a model that repeats itself.
REREAD_CHARS_MAX: Final = 1_000_000
_BLANKS: Final = regex.compile(r"\s*+")
_FENCE: Final = regex.compile(r"```(?:json)?+\s++(?=\S)")
_BARE: Final = regex.compile(r"\{|\[\s*+(?:\{|(?P<name>[\w.-]++)\s*+\()")


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
        self._call_count = 0
        self._reread_chars = 0
        self._may_close = not options.is_thinking  # a closing mark may be an orphan

    def read(self) -> ParserSteps[None]:
        """Parse all of the answer."""
        self._content.is_fresh = not self._options.is_continued
        if self._content.is_fresh:
            yield from self._opening()
        start, end = self._marks.think_start, self._marks.think_end
        marks = Marks(start, end, *self._marks.dropped, *self._sections)
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
            elif mark == end and self._may_close and not (yield from self._quotes()):
                self._may_close = False
                self._content.begin_answer()
            else:
                self._write_mark(mark)
        self._content.end()

    def _write_mark(self, mark: str) -> None:
        """Take a mark for text, or leave it out where it only frames what follows."""
        if mark in self._marks.dropped:
            self._content.is_fresh = True
        else:
            self._may_close = False
            self._content.write(mark)

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
            yield from self._likely_block()

    def _think_block(self) -> ParserSteps[None]:
        """Read a think block behind its mark; one that never closes is all there is."""
        self._may_close = False
        mark = yield from self._buffer.scan(Marks(self._marks.think_end), self._reasoning.write)
        self._reasoning.end()
        if mark:
            self._content.begin_answer()

    def _likely_block(self) -> ParserSteps[None]:
        """Read a think block that nobody opened; a call ends it, too.

        An answer without any end of a block was no reasoning after all: it is content as well.
        """
        texts: list[str] = []

        def write(text: str) -> None:
            texts.append(text)
            self._reasoning.write(text)

        mark = yield from self._buffer.scan(Marks(self._marks.think_end, *self._sections), write)
        self._reasoning.end()
        self._may_close = False
        if mark == self._marks.think_end:
            self._content.begin_answer()
        elif mark:
            self._buffer.at -= len(mark)
        elif not self._buffer.is_cut:
            self._content.write("".join(texts))

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
        except UnreadableOutput:
            self._rewind()
            if count == self._call_count:
                self._buffer.at += len(section.start)
                self._write_mark(section.start)
        self._buffer.release()

    def _rewind(self) -> None:
        self._reread_chars += self._buffer.rewind()
        if self._reread_chars > REREAD_CHARS_MAX:
            self._sections = {}

    def _bare_calls(self) -> ParserSteps[bool]:
        """Read calls that nothing marks, where the answer begins; False if there are none.

        In JSON, or a list of them in Python; only of tools of the request: all else is an answer.
        They may stand in a fence.
        """
        if not self._sections or not self._options.tools:
            return False
        blanks = yield from self._buffer.run(_BLANKS)
        fence = yield from self._buffer.match(_FENCE, blanks)
        blanks += len(fence[0]) if fence else 0
        found = yield from self._buffer.match(_BARE, blanks)
        if not found or (found["name"] and not self._options.tools.known(found["name"])):
            return False
        count = self._call_count
        self._buffer.hold()
        self._buffer.at += blanks
        try:
            context = self._call_context(Section("", is_own=False))
            yield from (
                read_section(context)
                if found["name"]
                else json_calls(context, Trust(any_name=False, any_order=False))
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
