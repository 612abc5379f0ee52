"""Turns one request's tokens into text parts, tool calls and log probabilities for the client."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.answer_parts import (
    AnswerPart,
    AnswerParts,
    AnswerSplitter,
    Channel,
    StopMatcher,
    plain_splitter,
)
from hearth.worker.stream.detokenise import Detokeniser


@dataclass(slots=True)
class OutputPiece:
    """The parts that may be sent now, and the stop string that ended the answer, if any."""

    parts: list[AnswerPart]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop: str | None = None


@dataclass(slots=True)
class _WaitingText:
    """A text that may be content, with the entries of its tokens.

    The last token completed the text. The tokens before it hold parts of a character, or nothing.
    """

    entries: list[TokenLogprob]
    text: str
    start: int  # position of the text in what the model wrote
    content: str = ""  # content of the text, with characters that the parser put before it

    def content_entries(self) -> list[TokenLogprob]:
        """Return entries whose bytes together are the content.

        Where the tokens' own bytes are not the content, the last entry gets all of the content.
        Where only a part of the text is content, only the last entry is returned. Bytes that form
        no character stay as they are: such bytes identify the token. The content then has U+FFFD.
        """
        entries, content_bytes = self.entries, self.content.encode()
        is_whole_and_odd = self.content == self.text and "\ufffd" in self.content
        if is_whole_and_odd or b"".join(entry.token_bytes for entry in entries) == content_bytes:
            return entries
        earlier = entries[:-1] if self.content.endswith(self.text) else []
        silent = [replace(entry, token="", token_bytes=b"") for entry in earlier]
        return [*silent, replace(entries[-1], token=self.content, token_bytes=content_bytes)]


class OutputProcessor:
    """Turns tokens into pieces. Owner: the inference thread.

    Invariants: all pieces together are the answer, cut before a stop string. A token's log
    probability travels with the piece that brings the end of the token's text. So a token whose
    text is held back is not reported early, and a token within a stop string is not reported. The
    bytes of all entries together are the content. A token has an
    entry with the part of its text that is content, and no entry without such a part.
    """

    def __init__(
        self,
        detokeniser: Detokeniser,
        stops: list[str],
        splitter: AnswerSplitter | None = None,
        is_parallel: bool = True,
    ) -> None:
        """Without a splitter all text is content, as for the completion of a raw prompt.

        Unless `is_parallel`, the answer ends where a second call begins.
        """
        self._detokeniser = detokeniser
        self._splitter = splitter or plain_splitter()
        self._collector = self._splitter.collector
        self._collector.matcher = StopMatcher(stops)
        self._is_parallel = is_parallel
        self._calls = 0
        self.is_cut = False  # whether the model wrote more calls than the answer may have
        # Kept for a moment: log probabilities of one answer
        self._waiting: deque[_WaitingText] = deque()
        self._entries: list[TokenLogprob] = []  # logprobs of tokens whose text is not complete yet
        self._chars_fed = 0
        self._texts: list[str] = []
        self.channel: Channel = "content"  # channel of the last part
        self.reasoning_tokens = 0

    @property
    def text(self) -> str:
        """The text up to the stop string, with all markup."""
        return "".join(self._texts)[
            : self._collector.content_end if self._collector.matcher.stop else None
        ]

    @property
    def parts(self) -> AnswerParts:
        """All parts so far."""
        parts = self._collector.parts
        return replace(parts, calls=parts.calls[:1]) if self.is_cut else parts

    def add(self, token_id: int, logprob: TokenLogprob | None) -> OutputPiece:
        """Add the next token of the answer, and return what it completes.

        An end-of-turn token is never added.
        """
        text = self._detokeniser.add(token_id)
        if logprob is not None:
            self._entries.append(logprob)
        if text and self._entries:
            self._waiting.append(_WaitingText(self._entries, text, self._chars_fed))
            self._entries = []
        self._chars_fed += len(text)
        self._texts.append(text)
        piece = self._piece(self._splitter.feed(text))
        self.reasoning_tokens += self.channel == "reasoning"
        return piece

    def finish(self, is_complete: bool) -> OutputPiece:
        """End the generation, and return the text that was held back, up to a stop string.

        `is_complete`: the model ended its turn. Otherwise the last text is cut off.
        """
        return self._piece(self._splitter.finish(is_complete), is_last=True)

    def _piece(self, parts: list[AnswerPart], is_last: bool = False) -> OutputPiece:
        for index, part in enumerate(parts):
            self._calls += bool(part.name)
            if self._calls > 1 and not self._is_parallel:  # one call too many
                self.is_cut, parts = True, parts[:index]
                break
        # In a cut answer, a stop string stands after the cut.
        stop = None if self.is_cut else self._collector.matcher.stop
        if parts:
            self.channel = parts[-1].channel
        is_over = is_last or stop is not None or self.is_cut
        return OutputPiece(parts, self._completed_entries(parts, is_over), stop)

    def _completed_entries(self, parts: list[AnswerPart], is_over: bool) -> list[TokenLogprob]:
        """Return the entries of the texts that end in the content of `parts`."""
        if not self._waiting:
            return []
        ready = []
        for part in parts:
            # The rest of a text in which a call begins belongs to the call.
            if part.name and self._waiting and self._waiting[0].content:
                ready += self._waiting.popleft().content_entries()
            offset = 0
            for length, end in part.spans:
                ready += self._entries_up_to(part.text[offset : offset + length], end)
                offset += length
        if is_over and self._waiting and self._waiting[0].content:
            ready += self._waiting.popleft().content_entries()
        return ready

    def _entries_up_to(self, content: str, end: int) -> Iterator[TokenLogprob]:
        """Yield the entries of the texts before `end`, the position where `content` ends.

        The model did not write the line break between two messages in `content`. Such a line break
        is added to the text after the break.
        """
        begin = position = end - len(content)
        unassigned = ""
        while self._waiting and self._waiting[0].start < end:
            first = self._waiting[0]
            stop = min(first.start + len(first.text), end)
            if stop > position:
                unassigned, position = unassigned + content[position - begin : stop - begin], stop
                if stop == end or unassigned[-1] == first.text[stop - first.start - 1]:
                    first.content, unassigned = first.content + unassigned, ""
            if first.start + len(first.text) > end:
                return
            self._waiting.popleft()
            if first.content:
                yield from first.content_entries()
