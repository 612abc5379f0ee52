"""Ends requests that generate for too long, or get no further."""

from dataclasses import dataclass
from typing import Final

from hearth.shared.suspending_clock import awake_s
from hearth.worker.schedule.request_state import Request

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
