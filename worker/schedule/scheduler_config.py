"""Defines the limits and callbacks that a scheduler is made with."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hearth.shared.wire_messages import Usage
from hearth.worker.cache.block_hash import Tokens
from hearth.worker.schedule.generation_watchdog import GenerationWatchdog
from hearth.worker.schedule.memory_guard import MemoryGuard
from hearth.worker.schedule.pressure_relief import PressureRelief
from hearth.worker.schedule.request_state import RecallDone, Request
from hearth.worker.schedule.suspects.running_forwards import RunningForwards
from hearth.worker.schedule.suspects.suspect_isolation import SuspectIsolation


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and callbacks of one scheduler, from the model and the settings. Never changes.

    The inference thread calls `natural_cuts` and `ended`; any thread may call `post`.
    """

    slots_max: int  # requests that compute at once
    natural_cuts: Callable[[Tokens], list[int]]  # of every prompt that begins with some tokens
    chunk: int = 1 << 40  # tokens; a forward amid an image ends at a multiple of this
    # Records each request's end (request, usage, reason, stop string); returns the client's usage.
    ended: Callable[[Request, Usage, str, str | None], Usage] = lambda _r, usage, _w, _s: usage
    # Queues for the inference thread what the disk thread has read.
    post: Callable[[RecallDone], None] = lambda _: None
    watchdog: GenerationWatchdog = GenerationWatchdog()
    memory: MemoryGuard = MemoryGuard()
    relief: PressureRelief = field(default_factory=PressureRelief)
    forwards: RunningForwards = field(default_factory=RunningForwards)
    isolation: SuspectIsolation = field(default_factory=SuspectIsolation)

    def forward_end(self, position: int, cut: int) -> int:
        """Return where a forward to a prompt's next `cut` ends: at the cut, or amid a long image.

        Idle prefill uses it too, so that it reads a prompt in the same forwards as a request.
        """
        assert position < cut, (position, cut)
        return min(cut, (position // self.chunk + 1) * self.chunk)
