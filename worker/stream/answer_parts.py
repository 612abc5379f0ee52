"""Splits one answer, while it is generated, into its parts: reasoning, content and tool calls."""

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from hearth.shared.written_numbers import object_or_text
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, Marks, ParserSteps

_SURROGATE: Final = re.compile("[\ud800-\udfff]")

Channel = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer. The first piece of a call has the tool's name, and maybe no text."""

    channel: Channel
    text: str  # text, or the next piece of a call's JSON arguments
    name: str = ""  # name of the called tool, in the first piece of a call
    # Of content: pairs of a number of characters and their end position in the model's text.
    spans: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    call_id: str = field(default="", compare=False)  # the id that the model wrote, "" without one


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. Arguments that are no JSON object stay text."""

    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """All parts of one turn of the model."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerStopped(Exception):
    """The content holds a stop string: the text after the string is not read."""


class StopMatcher:
    """Passes text through, holding back only what may be the beginning of a stop string.

    Invariants: the returned texts are the input up to the first complete stop string, however the
    input was cut into pieces. Of several stop strings with the same end, the longest counts.
    The text that is held back is shorter than the longest stop string.
    Owner: the inference thread.
    """

    def __init__(self, stops: list[str]) -> None:
        assert all(stops), "an empty stop string would end everything at once"
        self._stops = stops
        self._partial_max = max(map(len, stops), default=1) - 1
        self.held_back = ""  # text that may be the beginning of a stop string
        self.stop: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """Add the next piece of text, and return the text that may be sent."""
        self.held_back += text
        hits = [(self.held_back.find(stop), stop) for stop in self._stops]
        ended = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if ended:
            _, start, self.stop = min(ended)
            shown, self.held_back = self.held_back[:start], ""
            return shown
        lengths = range(min(self._partial_max, len(self.held_back)), 0, -1)
        tails = (self.held_back[-length:] for length in lengths)
        tail = next((tail for tail in tails if any(s.startswith(tail) for s in self._stops)), "")
        shown, self.held_back = self.held_back.removesuffix(tail), tail
        return shown

    def finish(self) -> str:
        """Return the text that was held back: no stop string can be completed any more."""
        shown, self.held_back = self.held_back, ""
        return shown


class AnswerCollector:
    """Collects the parts of one answer, up to a stop string. Owner: the inference thread.

    Invariant: arguments belong to the call that began last, and no part is taken back. Only content
    is searched for stop strings: thinking and calls are not.
    """

    def __init__(self, buffer: LookaheadBuffer) -> None:
        """`buffer` holds the text that the model wrote."""
        self._buffer = buffer
        self._new: list[AnswerPart] = []
        self._texts: dict[Channel, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[tuple[str, list[str]]] = []
        self.matcher = StopMatcher([])
        self.content_end = 0  # position in the model's text at which the sent content ends

    @property
    def position(self) -> int:
        """How many characters of the model's text were read."""
        return self._buffer.position

    def text(self, channel: Channel, text: str, chars_after: int = 0) -> None:
        """Add reasoning or content, which ends `chars_after` characters before `position`.

        Raises AnswerStopped where a stop string ends in the content.
        """
        text = _whole_characters(text)
        if channel != "content":
            self.flush()
            self._add(channel, text)
            return
        chars_after += len(self.matcher.held_back) + len(text)
        shown = self.matcher.feed(text)
        self.content_end = self.position - chars_after + len(shown)
        self._add(channel, shown)
        if self.matcher.stop is not None:
            raise AnswerStopped

    def flush(self) -> None:
        """Add the content that was held back: no stop string began in it."""
        text = self.matcher.finish()
        self.content_end += len(text)
        self._add("content", text)

    def _add(self, channel: Channel, text: str) -> None:
        if text:
            self._texts[channel].append(text)
            spans = ((len(text), self.content_end),) if channel == "content" else ()
            self._new.append(AnswerPart(channel, text, spans=spans))

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call; `call_id` is the id that the model wrote, "" without one."""
        assert name
        self.flush()
        name = _whole_characters(name)
        self._calls.append((name, []))
        self._new.append(AnswerPart("tool_call", "", name, call_id=call_id))

    def arguments(self, text: str) -> None:
        """Add a piece of the arguments of the call that began last."""
        assert self._calls, text
        if text:
            text = _whole_characters(text)
            self._calls[-1][1].append(text)
            self._new.append(AnswerPart("tool_call", text))

    def take(self) -> list[AnswerPart]:
        """Return the new parts; neighbours of one channel become one part."""
        taken: list[list[AnswerPart]] = []
        for part in self._new:
            if taken and taken[-1][0].channel == part.channel and not part.name:
                taken[-1].append(part)
            else:
                taken.append([part])
        self._new = []
        return [
            replace(
                parts[0],
                text="".join(part.text for part in parts),
                spans=tuple(span for part in parts for span in part.spans),
            )
            for parts in taken
        ]

    @property
    def parts(self) -> AnswerParts:
        """All parts that were added."""
        calls = tuple(ToolCall(name, object_or_text("".join(texts))) for name, texts in self._calls)
        return AnswerParts(
            "".join(self._texts["reasoning"]), "".join(self._texts["content"]), calls
        )


class AnswerSplitter:
    """Splits one answer while it is generated. Owner: the inference thread.

    Invariants: the parts depend on the text alone and not on how it is cut into pieces. A part is
    never taken back. Only text that may still become a mark or a call is held back.
    """

    def __init__(
        self, buffer: LookaheadBuffer, collector: AnswerCollector, steps: ParserSteps[Any]
    ) -> None:
        """`steps` parses the text in `buffer` and adds the parts to `collector`."""
        self._buffer = buffer
        self.collector = collector
        self._steps: Any = steps

    def feed(self, text: str) -> list[AnswerPart]:
        """Add the next piece of the answer, and return the parts that are certain."""
        assert not self._buffer.is_over
        self._buffer.add(text)
        self._read()
        return self.collector.take()

    def finish(self, is_complete: bool) -> list[AnswerPart]:
        """End the answer and return its last parts.

        `is_complete`: the model ended its turn, and was not cut off.
        """
        self._buffer.finish(is_complete)
        self._read()
        self.collector.flush()
        return self.collector.take()

    def _read(self) -> None:
        try:
            is_waiting = next(self._steps, self) is not self
        except AnswerStopped:
            return
        assert not (is_waiting and self._buffer.is_over), "no more text ever comes"


def plain_splitter() -> AnswerSplitter:
    """Return a splitter that takes all text for content."""
    buffer = LookaheadBuffer()
    collector = AnswerCollector(buffer)
    steps = buffer.scan(Marks(), partial(collector.text, "content"))
    return AnswerSplitter(buffer, collector, steps)


def _whole_characters(text: str) -> str:
    """Return `text` with U+FFFD in place of single surrogates, which UTF-8 cannot encode."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ReasoningWriter:
    """Writes think blocks without the newlines around them; each block begins a new line.

    Owner: the inference thread.
    """

    def __init__(self, collector: AnswerCollector) -> None:
        self._collector = collector
        self._is_empty = True  # no block has text so far
        self._pending: str | None = (
            None  # newlines that may end the block; None = block without text
        )

    def write(self, text: str) -> None:
        """Add the next piece of the block."""
        if self._pending is None:
            text = text.lstrip("\n")
            if not text:
                return
            self._pending = "" if self._is_empty else "\n"
            self._is_empty = False
        body = text.rstrip("\n")
        if body:
            self._collector.text("reasoning", self._pending + body)
            self._pending = ""
        self._pending += text[len(body) :]

    def end(self) -> None:
        """End the block."""
        self._pending = None


class ContentWriter:
    """Writes content, without the blanks that only separate calls and think blocks from text.

    Between two texts with calls between them, the blanks before the first call are content. If
    there are none, those after the last call are content. All other blanks are dropped.
    Owner: the inference thread.
    """

    def __init__(self, collector: AnswerCollector) -> None:
        self._collector = collector
        self._pending: list[
            str
        ] = []  # blanks; the text after them decides whether they are content
        self._before = ""  # the pending blanks before the call
        self._pending_end = 0  # position in the model's text at which the blanks end
        self._is_empty = True
        self._is_after_call = False
        self._begins_line = False  # whether the next text begins a line, as a message has ended
        self._skips_newlines = False  # newlines here belong to the think block before them
        self.is_fresh = True  # whether only blanks came after a call, a block or the beginning
        self._since_fence: list[str] = []  # the written content from the last fence on

    def write(self, text: str) -> None:
        """Add the next piece of text."""
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        body_and_blanks = text.lstrip()
        body = body_and_blanks.rstrip()
        self._pending_end = self._collector.position
        self._pending.append(text[: len(text) - len(body_and_blanks)])
        if body:
            blanks = "".join(self._pending)  # the blanks that are content
            if self._is_after_call:
                blanks = "" if self._is_empty else self._before or blanks
            content = "\n" * self._begins_line + blanks + body
            self._since_fence.append(content)
            self._collector.text("content", content, len(body_and_blanks) - len(body))
            self._pending = [body_and_blanks[len(body) :]]
            self._is_empty = self._is_after_call = self.is_fresh = self._begins_line = False

    def is_fenced(self) -> bool:
        """Return whether the next text stands within a fenced block."""
        texts = "".join(self._since_fence).split("```")
        is_open = len(texts) % 2 == 0
        self._since_fence = ["```" * is_open, texts[-1][-2:]]
        return is_open

    def begin_call(self) -> None:
        """Mark the beginning of a call here."""
        if not self._is_after_call:
            self._before = "".join(self._pending)
        self._pending = []
        self._is_after_call = self.is_fresh = True

    def begin_message(self) -> None:
        """Mark a message's beginning or end here. The next text begins a line."""
        self._begins_line = not self._is_empty
        self.is_fresh = True

    def begin_answer(self) -> None:
        """Mark the end of a think block here: the newlines after it belong to the block."""
        if self.is_fresh:
            self._pending = []
        self._skips_newlines = self.is_fresh = True

    def end(self) -> None:
        """End the answer."""
        if not self._is_after_call:
            chars_after = self._collector.position - self._pending_end
            self._collector.text("content", "".join(self._pending), chars_after)
        self._pending = []
