"""Turns one request's tokens into what the client gets: parts of text, calls, log probabilities."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.answer_parts import AnswerParts
from hearth.worker.stream.answer_splitter import AnswerPart, AnswerSplitter, Channel
from hearth.worker.stream.detokenise import Detokeniser
from hearth.worker.stream.stop_strings import StopMatcher


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

    @property
    def end(self) -> int:
        return self.start + len(self.text)

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
        self._matcher = StopMatcher(stops)
        self._splitter = splitter
        self._is_parallel = is_parallel
        self._calls = 0
        self.is_cut = False  # it has all the calls that it may have, and more was written
        self._waiting: deque[_WaitingText] = deque()
        self._entries: list[TokenLogprob] = []  # of tokens that have completed no text yet
        self._fed = 0  # characters
        self._texts: list[str] = []
        self._end: int | None = None  # of the text, in front of a stop string
        self._content_end = 0  # in the text, of the content that came last
        self._held = 0  # characters of that which are not shown
        self._shown = 0  # characters of content
        self.channel: Channel = "content"  # of the last part
        self.reasoning_tokens = 0

    @property
    def text(self) -> str:
        """The text up to a stop string, markup included."""
        return "".join(self._texts)[: self._end]

    @property
    def parts(self) -> AnswerParts:
        """All parts so far."""
        if self._splitter is None:
            return AnswerParts(content=self.text)
        parts = self._splitter.parts
        if self._end is not None:
            return replace(parts, content=parts.content[: self._shown])
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
        piece = self._piece(self._split(text))
        self.reasoning_tokens += self.channel == "reasoning"
        return piece

    def finish(self, is_complete: bool) -> OutputPiece:
        """End the generation and return what was held back, up to a stop string.

        `is_complete`: the model ended its turn itself; else what it was writing is cut off.
        """
        parts = [] if self._splitter is None else self._splitter.finish(is_complete)
        return self._piece(parts, is_last=True)

    def _split(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        self._texts.append(text)
        if self._splitter is None:
            return [AnswerPart("content", text, spans=((len(text), self._fed),))]
        return self._splitter.feed(text)

    def _piece(self, parts: list[AnswerPart], is_last: bool = False) -> OutputPiece:
        parts = self._allowed(parts)
        if parts:
            self.channel = parts[-1].channel
        shown, stop = self._until_stop(parts)
        if is_last and stop is None:
            shown += self._rest()
        is_over = is_last or stop is not None or self.is_cut
        return OutputPiece(shown, self._released(shown, is_over), stop)

    def _until_stop(self, parts: list[AnswerPart]) -> tuple[list[AnswerPart], str | None]:
        """Return what may be shown, up to the stop string that the content holds, and that.

        What the client does not get as content has none: no thinking, and no call.
        """
        shown: list[AnswerPart] = []
        for part in parts:
            if part.channel != "content":
                shown += [*self._rest(), part]
            at = 0
            for length, self._content_end in part.spans:
                hit = self._matcher.feed(part.text[at : at + length])
                at += length
                self._held += length - len(hit.text)
                shown += self._content(hit.text)
                if hit.stop is not None:
                    self._end = self._content_end - self._held
                    return shown, hit.stop
        return shown, None

    def _rest(self) -> list[AnswerPart]:
        """Return the content that no stop string can begin any more."""
        text = self._matcher.finish()
        self._held = 0
        return self._content(text)

    def _content(self, text: str) -> list[AnswerPart]:
        self._shown += len(text)
        spans = ((len(text), self._content_end - self._held),)
        return [AnswerPart("content", text, spans=spans)] if text else []

    def _allowed(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """Return the parts up to a call that is one too many."""
        for at, part in enumerate(parts):
            self._calls += bool(part.name)
            if self._calls > 1 and not self._is_parallel:
                self.is_cut = True
                return parts[:at]
        return parts

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
            stop = min(first.end, end)
            if stop > at:
                loose, at = loose + said[at - begin : stop - begin], stop
                if stop == end or loose[-1] == first.text[stop - first.start - 1]:
                    first.said, loose = first.said + loose, ""
            if first.end > end:
                return
            self._waiting.popleft()
            if first.said:
                yield from first.told()
