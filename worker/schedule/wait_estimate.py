"""Estimates how long a request would wait for a slot, from what the requests before it took.

Numbers only: nothing here knows of requests, slots or clocks.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# What is assumed until something was measured: a 27B model on a laptop, a short step of an agent.
PREFILL_TOKENS_PER_S: Final = 250.0
DECODE_S: Final = 10.0
PROMPT_TOKENS: Final = 2_000.0
_NEWEST: Final = 0.125  # how much the newest request counts in an average
_KEPT: Final = 0.95  # how much of the older chunks' weight is left after each chunk
_SECONDS_MIN: Final = 1e-6  # a clock that stood still is no infinite speed
_LEFT_MIN: Final = 0.25  # of an average answer: one that takes longer is not about to end


@dataclass(frozen=True, slots=True)
class Work:
    """Measures what is left to do for one request."""

    prefill_tokens: int | None  # None: it is not rendered yet
    decoding_s: float = 0.0  # since its first token


@dataclass(frozen=True, slots=True)
class Load:
    """Says what a worker has to do now: its running requests, its queue, the wait behind it."""

    running: int  # requests that hold a slot
    queue: list[str]  # the ids of those that do not, in the order in which they will
    wait_s: float  # until a request that came now, behind them all, has a slot


class Pace:
    """Averages over the last chunks and requests. Owner: the inference thread; others may read.

    Invariant: each average is of what was measured, or the constant above while nothing was.
    """

    def __init__(self) -> None:
        self.reading_tokens = 0  # in the chunk that is read now
        self.chunk_s = 0.0  # that the last chunk took
        self._fed_tokens = self._fed_s = 0.0  # of the last chunks, the newest counting most
        self._beside_s = 0.0  # that answers took meanwhile, likewise
        self.decode_s = DECODE_S  # from a request's first token to its end
        self.prompt_tokens = PROMPT_TOKENS  # prefilled for a request, beside those that were kept
        self._has_ended = False  # any request

    @property
    def prefill_tokens_per_s(self) -> float:
        if not self._fed_tokens:
            return PREFILL_TOKENS_PER_S
        return self._fed_tokens / max(self._fed_s, _SECONDS_MIN)

    @property
    def measured_tokens_per_s(self) -> float:
        """The speed of prefills; 0 while nothing was measured."""
        return self.prefill_tokens_per_s if self._fed_tokens else 0.0

    def note_chunk(self, tokens: int, seconds: float) -> None:
        """Note one chunk of a prefill."""
        assert tokens > 0 and seconds >= 0, (tokens, seconds)
        self.reading_tokens, self.chunk_s = 0, seconds
        self._fed_s = self._fed_s * _KEPT + seconds
        self._beside_s *= _KEPT
        self._fed_tokens = self._fed_tokens * _KEPT + tokens

    def note_beside(self, seconds: float) -> None:
        """Note a step of answers that a prompt waited for."""
        assert seconds >= 0, seconds
        self._beside_s += seconds if self._fed_tokens else 0.0

    def note_end(self, prefilled_tokens: int, decode_s: float) -> None:
        """Note one request that held a slot, however it ended."""
        assert prefilled_tokens >= 0 and decode_s >= 0, (prefilled_tokens, decode_s)
        newest = _NEWEST if self._has_ended else 1.0
        self.prompt_tokens += (prefilled_tokens - self.prompt_tokens) * newest
        self.decode_s += (decode_s - self.decode_s) * newest
        self._has_ended = True

    def wait_s(self, running: Sequence[Work], waiting: Iterable[Work], slots: int) -> float:
        """Return the seconds until one that comes behind all `waiting` has one of the `slots`.

        The prefills share the model, one after the other; the answers are written side by side.
        Never negative, always finite, and never less for one that waits more.
        """
        assert len(running) <= slots, (len(running), slots)
        free_at = [0.0] * (slots - len(running))
        fed_at = 0.0  # when the model is done with the prefills that it has begun
        for work in running:
            fed_at += self._prefill_s(work)
            left_s = max(self.decode_s - work.decoding_s, self.decode_s * _LEFT_MIN)
            heapq.heappush(free_at, left_s + (fed_at if work.prefill_tokens else 0.0))
        for work in waiting:
            begins_at = heapq.heappop(free_at)
            fed_at = max(fed_at, begins_at) + self._prefill_s(work)
            heapq.heappush(free_at, fed_at + self.decode_s)
        assert len(free_at) == slots and 0 <= free_at[0] < math.inf, (slots, free_at[0])
        return free_at[0]

    def _prefill_s(self, work: Work) -> float:
        known = work.prefill_tokens
        tokens = self.prompt_tokens if known is None else known
        slowed = 1 + self._beside_s / max(self._fed_s, _SECONDS_MIN)
        return tokens / self.prefill_tokens_per_s * slowed
