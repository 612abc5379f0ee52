"""Defines the limits and callbacks that a scheduler is made with, and ends what takes too long."""

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
    """Holds the limits in seconds; 0 = none. Owner: the inference thread.

    The time of a generation starts when its prefill ends, so that a long prompt costs an answer
    nothing. A request that waits, for a slot, for the disk or for another's prefill, has no times.
    A forward that never returns is not seen here: the supervisor sees that the steps stand still.
    """

    generation_s: float = 0.0
    stall_s: float = 0.0

    def verdict(self, request: Request, chunk_s: float = 0.0) -> str | None:
        """Return why the request must end now; None where it may go on.

        `chunk_s` is what the last chunk of a prompt took: others wait for two of them in turn.
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
    """Limits and callbacks of one scheduler, from the model and the settings. Never changes.

    The inference thread calls `natural_cuts` and `ended`; any thread may call `post`.
    """

    running_max: int  # requests that compute at once
    natural_cuts: Callable[[Tokens], list[int]]  # of every prompt that begins with some tokens
    grid: PrefillGrid = WHOLE  # a forward amid an image ends at its points
    # Records each request's end (request, usage, reason, stop string); returns the client's usage.
    ended: Callable[[Request, Usage, str, str | None], Usage] = lambda _r, usage, _w, _s: usage
    # Queues for the inference thread what the disk thread has read.
    post: Callable[[RecallDone], None] = lambda _: None
    watchdog: GenerationWatchdog = GenerationWatchdog()
    memory: MemoryGuard = MemoryGuard()
    power: PowerSource = field(default_factory=PowerSource)
    relief: PressureRelief = field(default_factory=PressureRelief)
    clock: Callable[[], float] = awake_s  # in seconds
    # Of a prefill's forward while answers are written; 0 = whole chunks, as at any other time.
    beside_goal_s: float = 0.0
    beside_tokens_min: int = 128  # it reads no fewer for that
    short_tokens: int = 2_048  # that a prompt reads at most which does not wait for answers
    suspects: Suspects = field(default_factory=Suspects)
    drafts: AnswerDrafts = field(default_factory=AnswerDrafts)

    def forward_end(self, position: int, cut: int) -> int:
        """Return where a forward to a prompt's next `cut` ends: at the cut, or amid a long image.

        Idle prefill uses it too, so that it reads a prompt in the same forwards as a request.
        """
        assert position < cut, (position, cut)
        step = self.grid.step_at(position)
        return min(cut, (position // step + 1) * step)

    def is_short(self, request: Request) -> bool:
        """Whether a prompt with a slot goes before answers, as it has few tokens to read."""
        return request.query.limit - request.cached_tokens <= self.short_tokens
