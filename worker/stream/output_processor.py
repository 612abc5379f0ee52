"""Turns one request's tokens into what the client gets: parts of text, calls, log probabilities."""

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
    """The parts that may be sent now, and the stop string that was met, if one was."""

    parts: list[AnswerPart]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop: str | None = None


@dataclass(slots=True)
class _WaitingText:
    """A text, from `start` on in what was written, that may be content; its tokens' entries.

    The last token completed it. Those in front of that one have parts of a character, or nothing.
    """

    entries: list[TokenLogprob]
    text: str
    start: int
    said: str = ""  # of the text, what is content; and what the parser put in front of it

    def told(self) -> list[TokenLogprob]:
        """Return the entries; all bytes are the last one's where alone they are not what was said.

        Where the text is said in part, that one is all. Bytes that are no character stay as they
        are, though U+FFFD is said for them: they name the token.
        """
        told, said = self.entries, self.said.encode()
        is_whole_and_odd = self.said == self.text and "\ufffd" in self.said
        if is_whole_and_odd or b"".join(each.token_bytes for each in told) == said:
            return told
        parts = told[:-1] if self.said.endswith(self.text) else []
        silent = [replace(each, token="", token_bytes=b"") for each in parts]
        return [*silent, replace(told[-1], token=self.said, token_bytes=said)]


class OutputProcessor:
    """Turns tokens into pieces. Owner: the inference thread.

    Invariants: all pieces together are the answer, cut before a stop string. A token's log
    probability travels with the piece that brings the last of its text, so a token that is held
    back, or swallowed by a stop string, is not reported early or at all. The entries are the
    content: one of which the content has a part only, or none, has that part, or is left out. Their
    bytes together are the content, whatever a token's bytes alone are.
    """

    def __init__(
        self,
        detokeniser: Detokeniser,
        stops: list[str],
        splitter: AnswerSplitter | None = None,
        is_parallel: bool = True,
    ) -> None:
        """Without a splitter all text is content: a raw prompt's completion.

        An answer that is not `is_parallel` is over where a second call begins.
        """
        self._detokeniser = detokeniser
        self._splitter = splitter or plain_splitter()
        self._collector = self._splitter.collector
        self._collector.matcher = StopMatcher(stops)
        self._is_parallel = is_parallel
        self._calls = 0
        self.is_cut = False  # it has all the calls that it may have, and more was written
        # Kept for a moment: log probabilities of one answer
        self._waiting: deque[_WaitingText] = deque()
        self._entries: list[TokenLogprob] = []  # of tokens that have completed no text yet
        self._fed = 0  # characters
        self._texts: list[str] = []
        self.channel: Channel = "content"  # of the last part
        self.reasoning_tokens = 0

    @property
    def text(self) -> str:
        """The text up to a stop string, markup included."""
        return "".join(self._texts)[: self._collector.end if self._collector.matcher.stop else None]

    @property
    def parts(self) -> AnswerParts:
        """All parts so far."""
        parts = self._collector.parts
        return replace(parts, calls=parts.calls[:1]) if self.is_cut else parts

    def add(self, token_id: int, logprob: TokenLogprob | None) -> OutputPiece:
        """Take the next token of the answer (never an end-of-turn token)."""
        text = self._detokeniser.add(token_id)
        if logprob is not None:
            self._entries.append(logprob)
        if text and self._entries:
            self._waiting.append(_WaitingText(self._entries, text, self._fed))
            self._entries = []
        self._fed += len(text)
        self._texts.append(text)
        piece = self._piece(self._splitter.feed(text))
        self.reasoning_tokens += self.channel == "reasoning"
        return piece

    def finish(self, is_complete: bool) -> OutputPiece:
        """End the generation and return what was held back, up to a stop string.

        `is_complete`: the model ended its turn itself; else what it was writing is cut off.
        """
        return self._piece(self._splitter.finish(is_complete), is_last=True)

    def _piece(self, parts: list[AnswerPart], is_last: bool = False) -> OutputPiece:
        for at, part in enumerate(parts):
            self._calls += bool(part.name)
            if self._calls > 1 and not self._is_parallel:  # one too many
                self.is_cut, parts = True, parts[:at]
                break
        stop = None if self.is_cut else self._collector.matcher.stop  # which stands behind the cut
        if parts:
            self.channel = parts[-1].channel
        is_over = is_last or stop is not None or self.is_cut
        return OutputPiece(parts, self._released(parts, is_over), stop)

    def _released(self, parts: list[AnswerPart], is_over: bool) -> list[TokenLogprob]:
        """Return the entries of the texts that end in the content of `parts`."""
        if not self._waiting:
            return []
        ready = []
        for part in parts:
            if part.name and self._waiting and self._waiting[0].said:  # its rest is a call's
                ready += self._waiting.popleft().told()
            at = 0
            for length, end in part.spans:
                ready += self._passed(part.text[at : at + length], end)
                at += length
        if is_over and self._waiting and self._waiting[0].said:
            ready += self._waiting.popleft().told()
        return ready

    def _passed(self, said: str, end: int) -> Iterator[TokenLogprob]:
        """Yield the entries of the texts up to `end`, where `said` ends, of what was written.

        What `said` has beyond that, a line break between two messages, goes with the text behind.
        """
        begin = at = end - len(said)
        loose = ""
        while self._waiting and self._waiting[0].start < end:
            first = self._waiting[0]
            stop = min(first.start + len(first.text), end)
            if stop > at:
                loose, at = loose + said[at - begin : stop - begin], stop
                if stop == end or loose[-1] == first.text[stop - first.start - 1]:
                    first.said, loose = first.said + loose, ""
            if first.start + len(first.text) > end:
                return
            self._waiting.popleft()
            if first.said:
                yield from first.told()
