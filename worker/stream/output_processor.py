"""Turns one request's tokens into what the client gets: parts of text, calls, log probabilities."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hearth.shared.wire_messages import TokenLogprob
from hearth.worker.stream.answer_splitter import AnswerPart, AnswerSplitter, Channel
from hearth.worker.stream.detokenise import Detokeniser
from hearth.worker.stream.model_output_format import AnswerParts
from hearth.worker.stream.stop_strings import StopMatcher


@dataclass(slots=True)
class OutputPiece:
    """The parts that may be sent now, and the stop string that was met, if one was."""

    parts: list[AnswerPart]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop: str | None = None


@dataclass(slots=True)
class _WaitingToken:
    """A token whose text, from `start` on in what was written, may be content."""

    entry: TokenLogprob
    text: str
    start: int
    said: str = ""  # of its text, what is content

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def told(self) -> TokenLogprob:
        """Return its entry, of what is content alone; bytes of a part of a character stay."""
        if not self.said.endswith(self.text):
            return _with_bytes(self.entry, self.said.encode())
        before = self.said.removesuffix(self.text).encode()
        return _with_bytes(self.entry, before + self.entry.token_bytes) if before else self.entry


class OutputProcessor:
    """Turns tokens into pieces. Owner: the inference thread.

    Invariants: all pieces together are the answer, cut before a stop string. A token's log
    probability travels with the piece that brings the last of its text, so a token that is held
    back, or swallowed by a stop string, is not reported early or at all. The entries are the
    content: one of which the content has a part only, or none, has that part, or is left out.
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
        self._waiting: deque[_WaitingToken] = deque()
        self._fed = 0  # characters given to the matcher
        self._shown = 0  # characters it let through
        self._texts: list[str] = []
        self.channel: Channel = "content"  # of the last part
        self.reasoning_tokens = 0

    @property
    def text(self) -> str:
        """The text that was let through, markup included."""
        return "".join(self._texts)

    @property
    def parts(self) -> AnswerParts:
        """All parts so far."""
        if self._splitter is None:
            return AnswerParts(content=self.text)
        parts = self._splitter.parts
        return replace(parts, calls=parts.calls[:1]) if self.is_cut else parts

    def add(self, token_id: int, logprob: TokenLogprob | None) -> OutputPiece:
        """Take the next token of the answer (never an end-of-turn token)."""
        text = self._detokeniser.add(token_id)
        if logprob is not None:
            self._waiting.append(_WaitingToken(_as_written(logprob, text), text, self._fed))
        self._fed += len(text)
        hit = self._matcher.feed(text)
        parts = self._split(hit.text)
        if hit.stop is not None and self._splitter is not None:
            parts += self._allowed(self._splitter.finish(is_complete=False, is_stopped=True))
        if parts:
            self.channel = parts[-1].channel
        self.reasoning_tokens += self.channel == "reasoning"
        is_over = hit.stop is not None or self.is_cut
        return OutputPiece(parts, self._released(parts, is_over), hit.stop)

    def finish(self, is_complete: bool) -> OutputPiece:
        """End the generation and return what was held back.

        `is_complete`: the model ended its turn itself; else what it was writing is cut off.
        """
        parts = self._split(self._matcher.finish())
        if self._splitter is not None:
            parts += self._allowed(self._splitter.finish(is_complete))
        return OutputPiece(parts, self._released(parts, is_over=True))

    def _split(self, text: str) -> list[AnswerPart]:
        self._shown += len(text)
        assert self._shown <= self._fed, (self._shown, self._fed)
        if not text:
            return []
        self._texts.append(text)
        if self._splitter is None:
            return [AnswerPart("content", text, spans=((len(text), self._shown),))]
        return self._allowed(self._splitter.feed(text))

    def _allowed(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        """Return the parts up to a call that is one too many."""
        for at, part in enumerate(parts):
            self._calls += bool(part.name)
            if self._calls > 1 and not self._is_parallel:
                self.is_cut = True
                return parts[:at]
        return parts

    def _released(self, parts: list[AnswerPart], is_over: bool) -> list[TokenLogprob]:
        """Return the entries of the tokens that end in the content of `parts`."""
        if not self._waiting:
            return []
        ready = []
        for part in parts:
            if part.name and self._waiting and self._waiting[0].said:  # its rest is a call's
                ready.append(self._waiting.popleft().told())
            at = 0
            for length, end in part.spans:
                said = part.text[at : at + length] if part.channel == "content" else ""
                ready += self._passed(said, end)
                at += length
        if is_over:
            ready += [token.told() for token in self._waiting if token.said]
        return ready

    def _passed(self, said: str, end: int) -> Iterator[TokenLogprob]:
        """Yield the entries of the tokens up to `end`, where `said` ends, of what was written.

        What `said` has beyond that, a line break between two messages, goes with the token behind.
        """
        begin = at = end - len(said)
        loose = ""
        while self._waiting and self._waiting[0].start < end:
            token = self._waiting[0]
            stop = min(token.end, end)
            if stop > at:
                loose, at = loose + said[at - begin : stop - begin], stop
                if loose[-1] == token.text[stop - token.start - 1]:
                    token.said, loose = token.said + loose, ""
            if token.end > end:
                return
            self._waiting.popleft()
            if is_part := begin <= token.start == token.end:  # of the next character
                token.said, loose = loose, ""
            if token.said or is_part:
                yield token.told()


def _as_written(entry: TokenLogprob, text: str) -> TokenLogprob:
    """Return the entry without the blank that a first token loses under SentencePiece."""
    alone = entry.token_bytes
    if alone.startswith(b" ") and len(alone.decode("utf-8", "ignore")) == len(text) + 1:
        return _with_bytes(entry, alone[1:])
    return entry


def _with_bytes(entry: TokenLogprob, octets: bytes) -> TokenLogprob:
    return replace(entry, token=octets.decode("utf-8", "replace"), token_bytes=octets)
