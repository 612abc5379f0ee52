"""One request's tokens on their way to the client: text, stop strings, log probabilities."""

from collections import deque
from dataclasses import dataclass, field

from shared.wire import TokenLogprob
from worker.stream.detokenise import Detokeniser
from worker.stream.stop import StopMatcher


@dataclass(slots=True)
class Piece:
    """What may be sent now, and the stop string that was met, if one was."""

    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stop: str | None = None


class Output:
    """Turns tokens into pieces; all pieces together are the answer, cut before a stop string.

    A token's log probability travels with the piece that brings its text, so a token that is
    held back, or swallowed by a stop string, is not reported early or at all.
    Owner: the inference thread.
    """

    def __init__(self, detokeniser: Detokeniser, stops: list[str]) -> None:
        self._detokeniser = detokeniser
        self._matcher = StopMatcher(stops)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # (where its text ends, entry)
        self._fed = 0  # characters given to the matcher
        self._shown = 0  # characters it let through

    def add(self, token_id: int, logprob: TokenLogprob | None) -> Piece:
        """Take the next token of the answer (never an end-of-turn token)."""
        text = self._detokeniser.add(token_id)
        self._fed += len(text)
        if logprob is not None:
            self._waiting.append((self._fed, logprob))
        hit = self._matcher.feed(text)
        self._shown += len(hit.text)
        return Piece(hit.text, self._released(), hit.stop)

    def finish(self) -> Piece:
        """The generation is over: give what was held back."""
        text = self._matcher.finish()
        self._shown += len(text)
        return Piece(text, self._released())

    def _released(self) -> list[TokenLogprob]:
        ready = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            ready.append(self._waiting.popleft()[1])
        return ready
