"""Parses an answer whose think blocks and tool calls stand between marks."""

from dataclasses import dataclass, replace
from typing import Any, Final

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
    more_thinking: tuple[tuple[str, str], ...] = ()  # other pairs around a think block
    header: Any = None  # of a message, in an answer that is a row of them


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
        self._sections = {
            name + each.start: replace(each, start=name + each.start)
            for each in sections
            for name in (options.tools.names if each.is_behind_name else [""])
        }
        pairs = [(output_marks.think_start, output_marks.think_end), *output_marks.more_thinking]
        self._think_starts = [start for start, _ in pairs if start]
        self._think_ends = [end for _, end in pairs if end]
        self._dropped = output_marks.dropped
        # A message of thinking may stand anywhere, and ends at the latest where another begins.
        self._begins: tuple[str, ...] = ()
        if output_marks.header:
            self._begins = (*self._dropped, *self._sections, *self._think_starts)
            self._dropped += tuple(self._think_ends)
        self._call_count = 0
        self._reread_chars = 0
        self._may_close = not options.is_thinking  # a closing mark may be an orphan

    def read(self) -> ParserSteps[None]:
        """Parse all of the answer."""
        self._content.is_fresh = not self._options.is_continued
        if self._content.is_fresh:
            yield from self._opening()
        starts, closes, dropped = self._think_starts, self._think_ends, self._dropped
        ends = {each.end for each in self._sections.values()}
        marks = Marks(*starts, *closes, *dropped, *self._sections, *ends)
        while True:
            if self._content.is_fresh:
                yield from self._header()
                if (yield from self._bare_calls()):
                    continue
            mark = yield from self._buffer.scan(marks, self._content.write)
            if not mark:
                break
            if mark in self._sections:
                yield from self._calls(self._sections[mark])
            elif mark in starts and (self._content.is_fresh or self._marks.header):
                yield from self._think_block()
            elif mark in dropped:
                self._content.begin_message()
            elif mark in closes and self._may_close and not (yield from self._quotes(mark)):
                self._may_close = False
                self._content.begin_answer()
            elif mark in ends and self._call_count and self._content.is_fresh:
                continue  # it ends calls whose own marks were others
            else:
                self._may_close = self._may_close and mark in ends
                self._content.write(mark)
        self._content.end()

    def _header(self) -> ParserSteps[None]:
        """Read the header of a message, where one stands here."""
        found = self._marks.header and (yield from self._buffer.match(self._marks.header))
        self._buffer.at += len(found[0]) if found else 0

    # ------------------------------------------------------------ think blocks

    def _opening(self) -> ParserSteps[None]:
        """Read the think block that the answer is to begin with."""
        if not self._think_starts:
            return
        blanks = yield from self._buffer.run(_BLANKS)
        for start in self._think_starts:
            if (yield from self._buffer.starts(start, blanks)):
                self._buffer.at += blanks + len(start)
                yield from self._think_block()
                return
        if self._options.is_thinking:
            yield from self._think_block()
        elif self._options.may_think:
            yield from self._likely_block()

    def _think_block(self) -> ParserSteps[None]:
        """Read a think block behind its mark; one that never closes is all there is."""
        self._may_close = False
        ends = Marks(*self._think_ends, *self._begins)
        mark = yield from self._buffer.scan(ends, self._reasoning.write)
        self._reasoning.end()
        if mark not in self._think_ends:
            self._buffer.at -= len(mark)
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

        mark = yield from self._buffer.scan(Marks(*self._think_ends, *self._sections), write)
        self._reasoning.end()
        self._may_close = False
        if mark in self._think_ends:
            self._content.begin_answer()
        elif mark:
            self._buffer.at -= len(mark)
        elif not self._buffer.is_cut:
            self._content.write("".join(texts))

    def _quotes(self, mark: str) -> ParserSteps[bool]:
        """Return whether the mark that was read stands between quotation marks."""
        before = self._buffer.before(len(mark))
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
                if section.start not in self._marks.dropped:
                    self._content.write(section.start)
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
