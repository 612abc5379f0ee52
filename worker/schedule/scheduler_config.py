"""Defines a scheduler's limits and callbacks, and finds requests that take too long."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Usage
from hearth.worker.cache.block_hash import Tokens
from hearth.worker.cache.prefill_grid import WHOLE, PrefillGrid
from hearth.worker.engine.system_state import PowerSource
from hearth.worker.schedule.answer_drafts import AnswerDrafts
from hearth.worker.schedule.memory_guard import MemoryGuard, PressureRelief
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.suspects import Suspects

CHUNKS_AWAITED: Final = 3


@dataclass(frozen=True, slots=True)
class GenerationWatchdog:
    """Holds the time limits of requests, in seconds; 0 = no limit. Owner: the inference thread.

    The time of a generation starts at the end of the prefill, so a long prompt does not count. A
    request that waits for a slot, for the disk or for another request's prefill has no times yet.
    If a forward never returns, the step count stops, and the supervisor detects this.
    """

    generation_s: float = 0.0
    stall_s: float = 0.0

    def verdict(self, request: Request, chunk_s: float = 0.0) -> str | None:
        """Return why the request must end now, or None.

        `chunk_s` is the time of the last prefill chunk; a request may wait for several of them.
        """
        times, now = request.times, awake_s()
        if times is None:
            return None
        if self.generation_s and now - times.prefilled_at > self.generation_s:
            return (
                f"it has generated for over {self.generation_s:g} s (GENERATION_WATCHDOG_SECONDS)"
            )
        stall_s = max(self.stall_s, CHUNKS_AWAITED * chunk_s)
        if self.stall_s and now - times.progressed_at > stall_s:
            return f"it got no further for over {stall_s:g} s (STALL_SECONDS)"
        return None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Holds a scheduler's limits and callbacks, from the model and the settings. Immutable.

    The inference thread calls `natural_cuts` and `ended`; any thread may call `post`.
    """

    running_max: int  # most requests that compute at once
    natural_cuts: Callable[[Tokens], list[int]]  # tokens -> cuts of each prompt that begins so
    grid: PrefillGrid = WHOLE  # positions where a forward may end inside an image
    # Records the end of a request (request, usage, reason, stop string); returns the final usage.
    ended: Callable[[Request, Usage, str, str | None], Usage] = lambda _r, usage, _w, _s: usage
    # Queues the result of a disk read for the inference thread.
    post: Callable[[RecallDone], None] = lambda _: None
    watchdog: GenerationWatchdog = GenerationWatchdog()
    memory: MemoryGuard = MemoryGuard()
    power: PowerSource = field(default_factory=PowerSource)
    relief: PressureRelief = field(default_factory=PressureRelief)
    clock: Callable[[], float] = awake_s  # in seconds
    # Desired seconds of a prefill forward while other requests decode; 0 = whole chunks.
    beside_goal_s: float = 0.0
    beside_tokens_min: int = 128  # fewest tokens of a shortened forward
    # A prompt with at most so many tokens to prefill goes before answers.
    short_tokens: int = 2_048
    suspects: Suspects = field(default_factory=Suspects)
    drafts: AnswerDrafts = field(default_factory=AnswerDrafts)

    def forward_end(self, position: int, cut: int) -> int:
        """Return where a forward to the next `cut` ends; a long image may end it earlier.

        Requests and idle prefill share this rule, so both read a prompt in the same forwards.
        """
        assert position < cut, (position, cut)
        step = self.grid.step_at(position)
        return min(cut, (position // step + 1) * step)

    def is_short(self, request: Request) -> bool:
        """Return whether a prompt with a slot has so few tokens to prefill that it goes first."""
        return request.query.limit - request.cached_tokens <= self.short_tokens
