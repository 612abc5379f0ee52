"""Estimates how long a request would wait for a slot, from the times of earlier requests.

It computes with numbers only, and uses no requests, slots or clocks.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# Used until something is measured; they suit a 27B model on a laptop and short steps of an agent.
PREFILL_TOKENS_PER_S: Final = 250.0
DECODE_S: Final = 10.0
PROMPT_TOKENS: Final = 2_000.0
_NEWEST: Final = 0.125  # weight of the newest request in an average
_KEPT: Final = 0.95  # each chunk multiplies the weight of older chunks by this
_SECONDS_MIN: Final = 1e-6  # least measured time, so that no speed is infinite
_LEFT_MIN: Final = 0.25  # an answer's remaining time is at least this share of the average


@dataclass(frozen=True, slots=True)
class Work:
    """Measures the work that is left for one request."""

    prefill_tokens: int | None  # None: the prompt is not rendered yet
    decoding_s: float = 0.0  # seconds since the first token


@dataclass(frozen=True, slots=True)
class Load:
    """Holds a worker's load: running requests, the queue, and the wait at the queue's end."""

    running: int  # requests that hold a slot
    queue: list[str]  # ids of the waiting requests, in the order in which they get slots
    wait_s: float  # seconds that a request arriving now would wait for a slot


class Pace:
    """Averages the last chunks and requests. Owner: the inference thread; other threads may read.

    Invariant: an average without measured values is one of the constants above.
    """

    def __init__(self) -> None:
        self.reading_tokens = 0  # tokens of the chunk in prefill
        self.chunk_s = 0.0  # seconds of the last chunk
        self._prefilled_tokens = self._prefilling_s = 0.0  # weighted sums over chunks
        self._beside_s = 0.0  # seconds of decode steps between the chunks, equally weighted
        self.decode_s = DECODE_S  # seconds from a request's first token to its end
        self.prompt_tokens = PROMPT_TOKENS  # tokens prefilled for a request, without cache hits
        self._has_ended = False  # whether any request has ended

    @property
    def prefill_tokens_per_s(self) -> float:
        if not self._prefilled_tokens:
            return PREFILL_TOKENS_PER_S
        return self._prefilled_tokens / max(self._prefilling_s, _SECONDS_MIN)

    @property
    def measured_tokens_per_s(self) -> float:
        """Speed of prefills; 0 while nothing is measured."""
        return self.prefill_tokens_per_s if self._prefilled_tokens else 0.0

    def record_chunk(self, tokens: int, seconds: float) -> None:
        """Record one chunk of a prefill."""
        assert tokens > 0 and seconds >= 0, (tokens, seconds)
        self.reading_tokens, self.chunk_s = 0, seconds
        self._prefilling_s = self._prefilling_s * _KEPT + seconds
        self._beside_s *= _KEPT
        self._prefilled_tokens = self._prefilled_tokens * _KEPT + tokens

    def record_beside(self, seconds: float) -> None:
        """Record a decode step that a prompt waited for."""
        assert seconds >= 0, seconds
        self._beside_s += seconds if self._prefilled_tokens else 0.0

    def record_end(self, prefilled_tokens: int, decode_s: float) -> None:
        """Record the end of a request that held a slot."""
        assert prefilled_tokens >= 0 and decode_s >= 0, (prefilled_tokens, decode_s)
        newest = _NEWEST if self._has_ended else 1.0
        self.prompt_tokens += (prefilled_tokens - self.prompt_tokens) * newest
        self.decode_s += (decode_s - self.decode_s) * newest
        self._has_ended = True

    def wait_s(self, running: Sequence[Work], waiting: Iterable[Work], slots: int) -> float:
        """Return the seconds until a request behind all `waiting` requests gets a slot.

        Prefills run one after the other; answers are decoded together. The result is finite and
        never negative, and no further waiting request lowers the result.
        """
        assert len(running) <= slots, (len(running), slots)
        free_at = [0.0] * (slots - len(running))
        prefilled_at = 0.0  # time at which the prefills so far are done
        for work in running:
            prefilled_at += self._prefill_s(work)
            left_s = max(self.decode_s - work.decoding_s, self.decode_s * _LEFT_MIN)
            heapq.heappush(free_at, left_s + (prefilled_at if work.prefill_tokens else 0.0))
        for work in waiting:
            begins_at = heapq.heappop(free_at)
            prefilled_at = max(prefilled_at, begins_at) + self._prefill_s(work)
            heapq.heappush(free_at, prefilled_at + self.decode_s)
        assert len(free_at) == slots and 0 <= free_at[0] < math.inf, (slots, free_at[0])
        return free_at[0]

    def _prefill_s(self, work: Work) -> float:
        known = work.prefill_tokens
        tokens = self.prompt_tokens if known is None else known
        slowed = 1 + self._beside_s / max(self._prefilling_s, _SECONDS_MIN)
        return tokens / self.prefill_tokens_per_s * slowed
