"""Splits one answer, while it is generated, into its parts: reasoning, content and tool calls."""

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

from hearth.shared.written_numbers import object_or_text
from hearth.worker.stream.lookahead_buffer import LookaheadBuffer, Marks, ParserSteps

_HALF: Final = re.compile("[\ud800-\udfff]")

Channel = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer. A call begins with a piece that has its name, and maybe no text."""

    channel: Channel
    text: str  # of a call: the next piece of its arguments' JSON
    name: str = ""  # of the tool that is called, where a call begins
    # Of content: (characters of the text, where they end in what the model wrote).
    spans: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    call_id: str = field(default="", compare=False)  # as the model wrote it, "" = it wrote none


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. Arguments that are no JSON object stay the text that they are."""

    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """All that the model said in one turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerStopped(Exception):
    """The content holds a stop string: nothing behind it is read."""


class StopMatcher:
    """Passes text through, holding back only what may be the beginning of a stop string.

    Invariants: the text returned over all calls is the input up to the stop string that is
    complete first, exclusive, however the input was cut into pieces; of several that end there the
    longest counts. What is held back is shorter than the longest stop string.
    Owner: the inference thread.
    """

    def __init__(self, stops: list[str]) -> None:
        assert all(stops), "an empty stop string would end everything at once"
        self._stops = stops
        self._partial_max = max(map(len, stops), default=1) - 1
        self.held = ""  # what may be the beginning of one
        self.stop: str | None = None  # that was met

    def feed(self, text: str) -> str:
        """Take the next piece of text, and return what of it may be shown."""
        self.held += text
        hits = [(self.held.find(stop), stop) for stop in self._stops]
        ended = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if ended:
            _, start, self.stop = min(ended)
            shown, self.held = self.held[:start], ""
            return shown
        lengths = range(min(self._partial_max, len(self.held)), 0, -1)
        tails = (self.held[-length:] for length in lengths)
        tail = next((each for each in tails if any(s.startswith(each) for s in self._stops)), "")
        shown, self.held = self.held.removesuffix(tail), tail
        return shown

    def finish(self) -> str:
        """Return what was held back: no stop string can complete any more."""
        shown, self.held = self.held, ""
        return shown


class AnswerCollector:
    """Collects the parts of one answer, up to a stop string. Owner: the inference thread.

    Invariant: arguments belong to the call that began last, and no part is taken back. Stop strings
    are those of the content alone: what the client gets as thinking, or as a call, has none.
    """

    def __init__(self, buffer: LookaheadBuffer) -> None:
        """`buffer` has what the model wrote."""
        self._buffer = buffer
        self._new: list[AnswerPart] = []
        self._texts: dict[Channel, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[tuple[str, list[str]]] = []
        self.matcher = StopMatcher([])
        self.end = 0  # of the content that was told, in what the model wrote

    @property
    def position(self) -> int:
        """How much was read of what the model wrote."""
        return self._buffer.position

    def text(self, channel: Channel, text: str, behind: int = 0) -> None:
        """Add reasoning or content, which ends `behind` characters before what was read last.

        Raises AnswerStopped where a stop string ends in the content.
        """
        text = _whole_characters(text)
        if channel != "content":
            self.flush()
            self._tell(channel, text)
            return
        behind += len(self.matcher.held) + len(text)
        shown = self.matcher.feed(text)
        self.end = self.position - behind + len(shown)
        self._tell(channel, shown)
        if self.matcher.stop is not None:
            raise AnswerStopped

    def flush(self) -> None:
        """Add the content in which a stop string may have begun: none did."""
        text = self.matcher.finish()
        self.end += len(text)
        self._tell("content", text)

    def _tell(self, channel: Channel, text: str) -> None:
        if text:
            self._texts[channel].append(text)
            spans = ((len(text), self.end),) if channel == "content" else ()
            self._new.append(AnswerPart(channel, text, spans=spans))

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call, to which the model may have written an id."""
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
        """Return what is new, neighbours of one kind as one part."""
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
        """All that was added."""
        calls = tuple(ToolCall(name, object_or_text("".join(texts))) for name, texts in self._calls)
        return AnswerParts(
            "".join(self._texts["reasoning"]), "".join(self._texts["content"]), calls
        )


class AnswerSplitter:
    """Splits one answer while it is generated. Owner: the inference thread.

    Invariants: the parts depend on the text alone and not on how it is cut into pieces; a part is
    never taken back; only what may still turn out to be a mark or a call is held back.
    """

    def __init__(
        self, buffer: LookaheadBuffer, collector: AnswerCollector, steps: ParserSteps[Any]
    ) -> None:
        """`steps` parse the text in `buffer` and give `collector` the parts."""
        self._buffer = buffer
        self.collector = collector
        self._steps: Any = steps

    def feed(self, text: str) -> list[AnswerPart]:
        """Take the next piece of the answer and return what is certain of it."""
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
    """Return the splitter of an answer that is content and nothing else."""
    buffer = LookaheadBuffer()
    collector = AnswerCollector(buffer)
    steps = buffer.scan(Marks(), partial(collector.text, "content"))
    return AnswerSplitter(buffer, collector, steps)


def _whole_characters(text: str) -> str:
    """Return `text` with U+FFFD for halves of characters, which nobody can send."""
    if not _HALF.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ReasoningWriter:
    """Writes think blocks, without the newlines at their ends; each block begins a line.

    Owner: the inference thread.
    """

    def __init__(self, collector: AnswerCollector) -> None:
        self._collector = collector
        self._is_empty = True  # no block has text so far
        self._pending: str | None = None  # newlines that may end the block; None = it has no text

    def write(self, text: str) -> None:
        """Take the next piece of the block."""
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
    """Writes content, without the blanks that only set calls and think blocks apart.

    Blanks beside a call are content only between text and text: those in front of the first call
    there, or where there are none, those behind the last. Owner: the inference thread.
    """

    def __init__(self, collector: AnswerCollector) -> None:
        self._collector = collector
        self._pending: list[str] = []  # blanks that are content or not by what follows
        self._before = ""  # those in front of the call
        self._pending_end = 0  # where they end in what the model wrote
        self._is_empty = True
        self._is_behind_call = False
        self._begins_line = False  # behind a message that has text
        self._skips_newlines = False  # they belong to the think block in front of them
        self.is_fresh = True  # nothing but blanks since the beginning, a call or a think block
        self._since_fence: list[str] = []  # of what was told, from the last fence that was found

    def write(self, text: str) -> None:
        """Take the next piece of text."""
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        behind = text.lstrip()
        body = behind.rstrip()
        self._pending_end = self._collector.position
        self._pending.append(text[: len(text) - len(behind)])
        if body:
            blanks = "".join(self._pending)  # as far as they are content
            if self._is_behind_call:
                blanks = "" if self._is_empty else self._before or blanks
            said = "\n" * self._begins_line + blanks + body
            self._since_fence.append(said)
            self._collector.text("content", said, len(behind) - len(body))
            self._pending = [behind[len(body) :]]
            self._is_empty = self._is_behind_call = self.is_fresh = self._begins_line = False

    def is_fenced(self) -> bool:
        """Return whether what comes now stands within a fenced block."""
        texts = "".join(self._since_fence).split("```")
        is_open = len(texts) % 2 == 0
        self._since_fence = ["```" * is_open, texts[-1][-2:]]
        return is_open

    def begin_call(self) -> None:
        """Take it that a call stands here."""
        if not self._is_behind_call:
            self._before = "".join(self._pending)
        self._pending = []
        self._is_behind_call = self.is_fresh = True

    def begin_message(self) -> None:
        """Take it that a message ends or begins here: text behind it begins a line."""
        self._begins_line = not self._is_empty
        self.is_fresh = True

    def begin_answer(self) -> None:
        """Take it that a think block ends here: newlines behind it belong to the block."""
        if self.is_fresh:
            self._pending = []
        self._skips_newlines = self.is_fresh = True

    def end(self) -> None:
        """End the answer."""
        if not self._is_behind_call:
            behind = self._collector.position - self._pending_end
            self._collector.text("content", "".join(self._pending), behind)
        self._pending = []
