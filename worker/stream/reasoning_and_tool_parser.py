"""Parses answers in which marks surround the think blocks and the tool calls."""

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

# Failed calls of one answer are read again as text, up to this limit: a model may repeat itself.
REREAD_CHARS_MAX: Final = 1_000_000
_BLANKS: Final = regex.compile(r"\s*+")
_FENCE: Final = regex.compile(r"```(?:json)?+\s++(?=\S)")
_BARE: Final = regex.compile(r"\{|\[\s*+(?:(?P<list>\{)|(?P<name>[\w.-]++)\s*+\()")


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """The marks that a model writes. Immutable."""

    thinking: tuple[str, str] = ("", "")  # marks around a think block; "" = the vocabulary's marks
    more_thinking: tuple[tuple[str, str], ...] = ()  # other pairs of marks around a think block
    framing: tuple[str, ...] = ()  # marks that only frame the content; {name} is any tool's name
    edges: tuple[str, ...] = ()  # texts that frame the content at its beginning and its end
    header: Any = None  # pattern of a message's header after `framing`; None = no messages
    sections: tuple[Section, ...] = ()  # sections that hold calls
    # Properties of one model, not of a format:
    forms: tuple[TagForm, ...] = ()  # forms of calls written as elements, the model's first
    tokens: frozenset[str] = frozenset()  # added tokens in the marks of calls and thinking


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The facts of a request that decide how its answer is parsed. Immutable."""

    tools: RequestTools
    is_thinking: bool  # the prompt left a think block open
    may_think: bool  # the model may begin with a think block without its opening mark
    takes_calls: bool
    is_continued: bool  # the prompt ends within content


class _CallCollector(AnswerCollector):
    """Collects calls alone: any other text raises UnreadableOutput. Owner: the inference thread."""

    def __init__(self, buffer: LookaheadBuffer) -> None:
        super().__init__(buffer)
        self.begun: list[int] = []  # position at which each call was recognised

    def call(self, name: str, call_id: str = "") -> None:
        super().call(name, call_id)
        self.begun.append(self.position)

    def text(self, channel: Channel, text: str, chars_after: int = 0) -> None:
        raise UnreadableOutput


class ReasoningAndToolParser:
    """Parses one answer. Owner: the inference thread.

    Invariant: text that turns out to be no call is content, exactly as it was written. Only marks
    that are tokens, and the marks of a call that was cut off, are left out.
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
            name + section.start: replace(section, start=name + section.start)
            for section in sections
            for name in (options.tools.names if section.follows_name else [""])
        }
        pairs = [output_marks.thinking, *output_marks.more_thinking]
        self._think_starts = [start for start, _ in pairs if start]
        self._think_ends = [end for _, end in pairs if end]
        # A message of thinking may stand anywhere; it ends where another message begins.
        names = ("user", *options.tools.names)
        self._dropped = {
            mark.replace("{name}", name) for mark in output_marks.framing for name in names
        }
        ends = (mark for section in sections for mark in (section.start, section.end))
        tokens = output_marks.tokens if sections and options.tools else frozenset()
        # In an answer to a request without tools, marks are content.
        self._tokens = {
            mark
            for mark in (*ends, *self._think_starts, *self._think_ends, *tokens)
            if any(token in mark for token in tokens)
        }
        begins = (*self._dropped, *self._sections, *self._think_starts)
        self._begins = begins if output_marks.header else ()
        self._call_count = 0
        self._reread_chars = 0
        self._may_close = not options.is_thinking  # a closing mark may come without an opening one
        self._has_opened = False  # an opening mark was written as content

    def read(self) -> ParserSteps[None]:
        """Parse all of the answer."""
        self._content.is_fresh = not self._options.is_continued
        if self._content.is_fresh:
            yield from self._read_opening()
        yield from self._read_answer()

    def _read_answer(self) -> ParserSteps[None]:
        starts, closes, dropped = self._think_starts, self._think_ends, self._dropped
        ends = {section.end for section in self._sections.values()}
        edges, tokens = self._marks.edges, self._tokens
        marks = Marks(*starts, *closes, *dropped, *edges, *self._sections, *ends, *tokens)
        while True:
            if self._content.is_fresh:
                yield from self._read_header()
                if (yield from self._read_bare_calls()):
                    continue
            mark = yield from self._buffer.scan(marks, self._content.write)
            if not mark:
                break
            if mark in self._sections:
                yield from self._read_calls(self._sections[mark])
            elif mark in starts and (self._content.is_fresh or self._marks.header):
                yield from self._read_think_block()
            elif mark in dropped:
                self._content.begin_message()
            elif (
                mark in closes
                and (mark in tokens or not self._has_opened)
                and not (yield from self._is_quoted(mark))
            ):
                if self._may_close:
                    self._content.begin_answer()
                self._may_close = False
            elif mark in ends and self._call_count and self._content.is_fresh:
                continue  # this mark ends calls of another form
            elif mark in edges and (yield from self._is_edge()):
                self._may_close = False
            elif mark in tokens and not (yield from self._is_quoted(mark)):
                continue
            else:
                self._may_close = self._may_close and mark in ends
                self._has_opened = mark in starts
                self._content.write(mark)
        self._content.end()

    def _is_edge(self) -> ParserSteps[bool]:
        """Return whether content begins or ends at the mark that was read last."""
        if self._content.is_fresh or self._may_close:
            return self._content.is_fresh
        return not (yield from self._buffer.peek((yield from self._buffer.offset_after(_BLANKS))))

    def _read_header(self) -> ParserSteps[None]:
        """Read the header of a message, if a whole or a cut-off header stands here."""
        if header := self._marks.header:
            found = yield from self._buffer.match(header, is_lenient=True)
            if found and found[0] and not (found.partial and self._buffer.is_complete):
                self._buffer.at += len(found[0])
                yield from self._read_header()

    # ------------------------------------------------------------ think blocks

    def _read_opening(self) -> ParserSteps[None]:
        """Read the think block at the beginning of the answer, if there is one."""
        if not self._think_starts:
            return
        blanks = yield from self._buffer.offset_after(_BLANKS)
        for start in self._think_starts:
            if (yield from self._buffer.take(start, blanks)):
                yield from self._read_think_block()
                return
        if self._options.is_thinking:
            yield from self._read_think_block()
        elif self._options.may_think and not (
            yield from self._buffer.match(Marks(*self._sections).pattern, blanks)
        ):
            yield from self._read_think_block(is_certain=False)

    def _read_think_block(self, is_certain: bool = True) -> ParserSteps[None]:
        """Read a think block after its opening mark; a block without an end is the whole answer.

        The model's last calls end the block, too. A block that is not `is_certain` had no opening
        mark. If no mark later in the answer ends such a block, the first call does. Without a call,
        the block's text is content.
        """
        self._may_close = False
        buffer, begin, decided = self._buffer, self._buffer.position, 0
        ends = ("", *self._think_ends, *self._begins)
        marks = Marks(*ends, *self._sections)
        buffer.keeps_all = not is_certain
        while (mark := (yield from buffer.scan(marks, self._reasoning.write))) not in ends:
            if buffer.position > decided:
                decided = yield from self._calls_of_thought(len(mark))
            is_certain = is_certain or not decided or (yield from self._has_think_end())
            if not is_certain or not decided:
                break
            self._reasoning.write(mark)
        self._reasoning.end()
        if mark not in self._think_ends:
            buffer.at -= len(mark)
        if mark:
            self._content.begin_answer()
        elif not is_certain and buffer.is_complete:
            self._rewind_to(begin)
        buffer.keeps_all = False

    def _calls_of_thought(self, back: int) -> ParserSteps[int]:
        """Return the position up to which calls within thinking are only thoughts.

        The calls begin `back` characters before the current position. Return 0 if all calls are
        real: whole calls of offered tools, followed only by the end of the answer, or by the end of
        the block and more calls. Calls before more thinking are thoughts. Calls in a block before
        content are thoughts, too: the model answered without a call. A call that is repeated later
        was a draft. No part is collected, and the buffer returns to its position.
        """
        buffer, kept, here = self._buffer, self._buffer.keeps_all, self._buffer.position
        buffer.keeps_all = True
        buffer.at -= back
        collector, options = _CallCollector(buffer), replace(self._options, is_thinking=False)
        parser = ReasoningAndToolParser(self._marks, options, buffer, collector)
        try:
            yield from parser._read_answer()
            decided = self._thoughts_end(collector, here - back)
        except UnreadableOutput:
            decided = buffer.position
        self._rewind_to(here)
        buffer.keeps_all = kept
        return decided

    def _thoughts_end(self, collector: _CallCollector, begin: int) -> int:
        """Return the position up to which the calls read from `begin` on are only thoughts.

        That is the position of the last call that cannot be real. Later calls may be real.
        """
        marks, calls = self._marks, collector.parts.calls
        closes = Marks(*self._think_ends).pattern.pattern
        text = regex.sub(rf"\s*+(?:(?:{closes})\s*+)*+$", "", self._buffer.text_since(begin))
        ends = {*self._dropped, *(section.end for section in self._sections.values())}
        if "" in ends:  # calls without an end mark end with complete JSON or the next token
            ends = {*ends, *"}])>"} - {""}
        is_ended = text.endswith((*ends, *filter(None, (form.call_end for form in marks.forms))))
        if not is_ended or not (
            self._buffer.is_complete  # a cut-off answer may have been in the middle of thinking
            or self._buffer.text_since(begin).rstrip().endswith(tuple(self._think_ends))
        ):
            return self._buffer.position
        # A call is incomplete if its argument runs past the end of the block up to another call.
        starts = Marks(*self._sections, *self._dropped).pattern.pattern
        next_call = regex.compile(rf"(?:{closes})(?:\s|\\n)*+(?:{starts})")
        last = {str(call): position for call, position in zip(calls, collector.begun, strict=True)}
        thoughts = (
            position
            for call, position in zip(calls, collector.begun, strict=True)
            if last[str(call)] != position
            or not self._options.tools.known_name(call.name)
            or not isinstance(call.arguments, dict)
            or next_call.search(str(call))
        )
        return max(thoughts, default=0) if calls else self._buffer.position

    def _has_think_end(self) -> ParserSteps[bool]:
        """Return whether the rest of the answer has a mark that ends a think block."""
        begin = self._buffer.position
        mark = yield from self._buffer.scan(Marks(*self._think_ends), lambda text: None)
        self._rewind_to(begin)
        return bool(mark)

    def _rewind_to(self, begin: int) -> None:
        """Go back to the position `begin`."""
        self._buffer.hold(chars_back=self._buffer.position - begin)
        self._rewind()

    def _is_quoted(self, mark: str) -> ParserSteps[bool]:
        """Return whether the mark that was read is quoted or, with tools, in a code block."""
        if self._options.tools and self._content.is_fenced():
            return True
        before = self._buffer.char_before(len(mark))
        return before in ("`", '"', "'") and (yield from self._buffer.starts(before))

    # ------------------------------------------------------------ calls

    def _call_context(self, section: Section) -> CallContext:
        tools, forms = self._options.tools, self._marks.forms
        return CallContext(self._buffer, self._collector, tools, self._begin_call, section, forms)

    def _begin_call(self) -> None:
        self._call_count += 1
        self._may_close = False
        self._content.begin_call()

    def _read_calls(self, section: Section) -> ParserSteps[None]:
        """Read the calls after a mark that was read; text that is no call becomes content."""
        assert section.start, "calls stand behind a mark"
        count = self._call_count
        self._buffer.hold(chars_back=len(section.start))
        self._buffer.at -= len(section.start) if section.is_head else 0
        blanks = yield from self._buffer.offset_after(_BLANKS)
        if not section.is_head:
            yield from self._buffer.take(section.start, blanks)  # the mark is doubled
        try:
            yield from (section.read or read_section)(self._call_context(section))
        except UnreadableOutput:
            is_cut_off = self._buffer.is_over and not self._buffer.is_complete
            self._rewind()
            if count == self._call_count:
                self._buffer.at += len(section.start)
                # A mark with a brace is JSON of the call.
                is_mark = section.start in {*self._dropped, *self._tokens} or (
                    is_cut_off and "{" not in section.start and bool(self._options.tools)
                )
                if not is_mark or (yield from self._is_quoted(section.start)):
                    self._content.write(section.start)
        self._buffer.release()

    def _rewind(self) -> None:
        self._reread_chars += self._buffer.rewind()
        if self._reread_chars > REREAD_CHARS_MAX:
            self._sections = {}

    def _read_bare_calls(self) -> ParserSteps[bool]:
        """Read calls without a mark at the beginning of the answer; False if there are none.

        The calls are JSON, or a list in Python, maybe in a fenced block. Only calls of the
        request's tools count: any other text is content. A list in JSON is content, too, unless the
        model's format writes calls as a list.
        """
        if not self._sections or not self._options.tools:
            return False
        blanks = yield from self._buffer.offset_after(_BLANKS)
        fence = yield from self._buffer.match(_FENCE, blanks)
        blanks += len(fence[0]) if fence else 0
        found = yield from self._buffer.match(_BARE, blanks)
        if (
            not found
            or (found["name"] and not self._options.tools.known_name(found["name"]))
            or (found["list"] and not any(start.startswith("[{") for start in self._sections))
        ):
            return False
        count = self._call_count
        self._buffer.hold()
        self._buffer.at += blanks
        try:
            context = self._call_context(Section("", takes_any_name=False))
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
            yield from self._buffer.take("```", (yield from self._buffer.offset_after(_BLANKS)))
        return is_call
