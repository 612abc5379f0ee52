"""Parses an answer whose think blocks and tool calls stand between marks."""

from dataclasses import dataclass, replace
from typing import Any, Final

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
from hearth.worker.stream.tool_calls.call_parser import read_section
from hearth.worker.stream.tool_calls.json_calls import CallContext, Section, Trust, json_calls
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from hearth.worker.stream.tool_calls.tag_form import TagForm

# Of failed calls in one answer, that are read again as text: a model that repeats itself.
REREAD_CHARS_MAX: Final = 1_000_000
_BLANKS: Final = regex.compile(r"\s*+")
_FENCE: Final = regex.compile(r"```(?:json)?+\s++(?=\S)")
_BARE: Final = regex.compile(r"\{|\[\s*+(?:(?P<list>\{)|(?P<name>[\w.-]++)\s*+\()")


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """The marks that a model writes. Immutable."""

    thinking: tuple[str, str] = ("", "")  # the marks around it; "" = those of the vocabulary
    more_thinking: tuple[tuple[str, str], ...] = ()  # other pairs that are around it, too
    framing: tuple[str, ...] = ()  # marks that only frame the content; {name} is any tool's
    edges: tuple[str, ...] = ()  # texts that do so at its beginning and its end
    header: Any = None  # matches what is no text behind `framing`: the answer is a row of messages
    sections: tuple[Section, ...] = ()  # in which calls stand
    # Known of a model, not of a format: forms of calls that are elements, its own first, and the
    # added tokens of which its calls and thinking are made.
    forms: tuple[TagForm, ...] = ()
    tokens: frozenset[str] = frozenset()


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

    def __init__(self, buffer: LookaheadBuffer) -> None:
        super().__init__(buffer)
        self.begun: list[int] = []  # where each call was known to be one

    def call(self, name: str, call_id: str = "") -> None:
        super().call(name, call_id)
        self.begun.append(self.position)

    def text(self, channel: Channel, text: str, behind: int = 0) -> None:
        raise UnreadableOutput


class ReasoningAndToolParser:
    """Parses one answer. Owner: the inference thread.

    Invariant: what turns out to be no call is content, exactly as it was written, but for marks
    that are tokens and those of a call that was cut off.
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
        pairs = [output_marks.thinking, *output_marks.more_thinking]
        self._think_starts = [start for start, _ in pairs if start]
        self._think_ends = [end for _, end in pairs if end]
        # A message of thinking may stand anywhere, and ends at the latest where another begins.
        names = ("user", *options.tools.names)
        self._dropped = {
            each.replace("{name}", name) for each in output_marks.framing for name in names
        }
        ends = (mark for each in sections for mark in (each.start, each.end))
        tokens = output_marks.tokens if sections and options.tools else frozenset()
        # Where nobody offers tools, marks are what the answer is about.
        self._tokens = {
            mark
            for mark in (*ends, *self._think_starts, *self._think_ends, *tokens)
            if any(token in mark for token in tokens)
        }
        begins = (*self._dropped, *self._sections, *self._think_starts)
        self._begins = begins if output_marks.header else ()
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
        starts, closes, dropped = self._think_starts, self._think_ends, self._dropped
        ends = {each.end for each in self._sections.values()}
        edges, tokens = self._marks.edges, self._tokens
        marks = Marks(*starts, *closes, *dropped, *edges, *self._sections, *ends, *tokens)
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
            elif (
                mark in closes
                and (mark in tokens or not self._has_opened)
                and not (yield from self._quotes(mark))
            ):
                if self._may_close:
                    self._content.begin_answer()
                self._may_close = False
            elif mark in ends and self._call_count and self._content.is_fresh:
                continue  # it ends calls whose own marks were others
            elif mark in edges and (yield from self._is_edge()):
                self._may_close = False
            elif mark in tokens and not (yield from self._quotes(mark)):
                continue
            else:
                self._may_close = self._may_close and mark in ends
                self._has_opened = mark in starts
                self._content.write(mark)
        self._content.end()

    def _is_edge(self) -> ParserSteps[bool]:
        """Return whether content begins or ends at the text that was read."""
        if self._content.is_fresh or self._may_close:
            return self._content.is_fresh
        return not (yield from self._buffer.peek((yield from self._buffer.run(_BLANKS))))

    def _header(self) -> ParserSteps[None]:
        """Read the header of a message, where one stands here, or was cut off."""
        if header := self._marks.header:
            found = yield from self._buffer.match(header, is_lenient=True)
            if found and found[0] and not (found.partial and self._buffer.is_complete):
                self._buffer.at += len(found[0])
                yield from self._header()

    # ------------------------------------------------------------ think blocks

    def _opening(self) -> ParserSteps[None]:
        """Read the think block that the answer is to begin with."""
        if not self._think_starts:
            return
        blanks = yield from self._buffer.run(_BLANKS)
        for start in self._think_starts:
            if (yield from self._buffer.take(start, blanks)):
                yield from self._think_block()
                return
        if self._options.is_thinking:
            yield from self._think_block()
        elif self._options.may_think and not (
            yield from self._buffer.match(Marks(*self._sections).pattern, blanks)
        ):
            yield from self._think_block(is_certain=False)

    def _think_block(self, is_certain: bool = True) -> ParserSteps[None]:
        """Read a think block behind its mark; one that never closes is all there is.

        The model's last calls end it, too. Not `is_certain`: nobody opened it; without any end of a
        block in the answer it is none up to the first mark of a call, or all of it is content.
        """
        self._may_close = False
        buffer, begin, decided = self._buffer, self._buffer.position, 0
        ends = ("", *self._think_ends, *self._begins)
        marks = Marks(*ends, *self._sections)
        buffer.keeps_all = not is_certain
        while (mark := (yield from buffer.scan(marks, self._reasoning.write))) not in ends:
            if buffer.position > decided:
                decided = yield from self._calls_of_thought(len(mark))
            is_certain = is_certain or not decided or (yield from self._closes())
            if not is_certain or not decided:
                break
            self._reasoning.write(mark)
        self._reasoning.end()
        if mark not in self._think_ends:
            buffer.at -= len(mark)
        if mark:
            self._content.begin_answer()
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
            decided = self._thoughts_end(collector, here - back)
        except UnreadableOutput:
            decided = buffer.position
        self._back_to(here)
        buffer.keeps_all = kept
        return decided

    def _thoughts_end(self, collector: _CallCollector, begin: int) -> int:
        """Return up to where calls, all that was read from `begin` on, are thoughts.

        That is behind the last that cannot be made: those behind it may be, without those before.
        """
        marks, calls = self._marks, collector.parts.calls
        closes = Marks(*self._think_ends).pattern.pattern
        text = regex.sub(rf"\s*+(?:(?:{closes})\s*+)*+$", "", self._buffer.since(begin))
        ends = {*self._dropped, *(each.end for each in self._sections.values())}
        if "" in ends:  # what ends so may be JSON that is whole, or a token behind it
            ends = {*ends, *"}])>"} - {""}
        is_ended = text.endswith((*ends, *filter(None, (form.call_end for form in marks.forms))))
        if not is_ended or not (
            self._buffer.is_complete  # cut off here, the thinking might have gone on
            or self._buffer.since(begin).rstrip().endswith(tuple(self._think_ends))
        ):
            return self._buffer.position
        # An argument that runs beyond the block up to another call: the first was broken off.
        starts = Marks(*self._sections, *self._dropped).pattern.pattern
        anew = regex.compile(rf"(?:{closes})(?:\s|\\n)*+(?:{starts})")
        last = {str(call): at for call, at in zip(calls, collector.begun, strict=True)}
        thoughts = (
            at
            for call, at in zip(calls, collector.begun, strict=True)
            if last[str(call)] != at
            or not self._options.tools.known(call.name)
            or not isinstance(call.arguments, dict)
            or anew.search(str(call))
        )
        return max(thoughts, default=0) if calls else self._buffer.position

    def _closes(self) -> ParserSteps[bool]:
        """Return whether a mark that ends a think block is still to come."""
        begin = self._buffer.position
        mark = yield from self._buffer.scan(Marks(*self._think_ends), lambda text: None)
        self._back_to(begin)
        return bool(mark)

    def _back_to(self, begin: int) -> None:
        """Go back to where `begin` characters were read."""
        self._buffer.hold(back=self._buffer.position - begin)
        self._rewind()

    def _quotes(self, mark: str) -> ParserSteps[bool]:
        """Return whether the mark that was read is quoted, or stands in code where tools are."""
        if self._options.tools and self._content.is_fenced():
            return True
        before = self._buffer.before(len(mark))
        return before in ("`", '"', "'") and (yield from self._buffer.starts(before))

    # ------------------------------------------------------------ calls

    def _call_context(self, section: Section) -> CallContext:
        tools, forms = self._options.tools, self._marks.forms
        return CallContext(self._buffer, self._collector, tools, self._begin_call, section, forms)

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
        if not section.is_head:
            yield from self._buffer.take(section.start, blanks)  # the mark is doubled
        try:
            yield from (section.read or read_section)(self._call_context(section))
        except UnreadableOutput:
            is_cut_off = self._buffer.is_over and not self._buffer.is_complete
            self._rewind()
            if count == self._call_count:
                self._buffer.at += len(section.start)
                # A mark with a brace is the call's own JSON.
                is_mark = section.start in {*self._dropped, *self._tokens} or (
                    is_cut_off and "{" not in section.start and bool(self._options.tools)
                )
                if not is_mark or (yield from self._quotes(section.start)):
                    self._content.write(section.start)
        self._buffer.release()

    def _rewind(self) -> None:
        self._reread_chars += self._buffer.rewind()
        if self._reread_chars > REREAD_CHARS_MAX:
            self._sections = {}

    def _bare_calls(self) -> ParserSteps[bool]:
        """Read calls that nothing marks, where the answer begins; False if there are none.

        In JSON, or a list of them in Python; only of tools of the request: all else is an answer,
        as is a list in JSON unless the model writes its calls so. They may stand in a fence.
        """
        if not self._sections or not self._options.tools:
            return False
        blanks = yield from self._buffer.run(_BLANKS)
        fence = yield from self._buffer.match(_FENCE, blanks)
        blanks += len(fence[0]) if fence else 0
        found = yield from self._buffer.match(_BARE, blanks)
        if (
            not found
            or (found["name"] and not self._options.tools.known(found["name"]))
            or (found["list"] and not any(each.startswith("[{") for each in self._sections))
        ):
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
            yield from self._buffer.take("```", (yield from self._buffer.run(_BLANKS)))
        return is_call
