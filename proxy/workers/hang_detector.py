"""Detects a worker that is stuck: it says that it computes, and gets no step further.

On a slow CPU one step can take minutes. The CPU seconds in its heartbeats tell such a step from one
that waits for ever, and the speed that was measured from one that goes round for ever.
"""

from typing import Final

from hearth.shared.wire_messages import Heartbeat

COMPUTES_SHARE: Final = 0.1  # of the time, on a CPU: a heartbeat a second takes 0.003 of it
SLOWER_MAX: Final = 10  # than measured: deep in a prompt, and beside other programs
UNMEASURED_MAX: Final = 10  # stalls that a step may take which nothing is known of


class HangDetector:
    """Measures for how long one start of a worker has made no step. Owner: the event loop.

    It adds up the seconds that the supervisor has watched, so that it stands while nobody watches.
    Invariant: `stalled_s` is 0 while the worker loads, holds nothing, or has just made a step.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._steps = -1
        self._computed_to_s = 0.0  # of `stalled_s`, where it was last seen to compute
        self._computed_cpu_s = 0.0  # its CPU seconds there
        self._beat: Heartbeat | None = None

    def tick(self, beat: Heartbeat | None, elapsed_s: float) -> float:
        """Take in the last heartbeat, `elapsed_s` after the tick before; return `stalled_s`.

        A worker that loads, or holds nothing, is not stuck.
        """
        assert elapsed_s >= 0, elapsed_s
        self._beat = beat
        if beat is None or beat.state != "ready" or not beat.running + beat.waiting:
            self._begin(-1, 0.0)
        elif beat.steps != self._steps:
            self._begin(beat.steps, beat.cpu_s)
        else:
            self.stalled_s += elapsed_s
            waited_s = self.stalled_s - self._computed_to_s
            if beat.cpu_s - self._computed_cpu_s > COMPUTES_SHARE * waited_s:
                self._computed_to_s, self._computed_cpu_s = self.stalled_s, beat.cpu_s
        return self.stalled_s

    def _begin(self, steps: int, cpu_s: float) -> None:
        self.stalled_s, self._steps = 0.0, steps
        self._computed_to_s, self._computed_cpu_s = 0.0, cpu_s

    def hangs(self, stall_s: float) -> bool:
        """Whether it has computed nothing for `stall_s`."""
        return self.stalled_s - self._computed_to_s >= stall_s

    def slowness(self, stall_s: float) -> str:
        """Return why a step that computes has had its time; "" where it may go on, or `hangs`."""
        beat = self._beat
        if beat is None or self.stalled_s < stall_s or self.hangs(stall_s):
            return ""
        speed, tokens = beat.prefill_tokens_per_s, beat.reading_tokens
        limit_s = UNMEASURED_MAX * stall_s
        known = f"{UNMEASURED_MAX} times STALL_SECONDS, as its speed is not known"
        if speed and tokens:
            limit_s = max(stall_s, SLOWER_MAX * tokens / speed)
            known = f"{SLOWER_MAX} times what {tokens:,} tokens take at the {speed:.3g} tokens/s "
            known += "that were measured, and STALL_SECONDS at least"
        if self.stalled_s < limit_s:
            return ""
        return (
            f"one step computed for {self.stalled_s:.0f} s, and the limit is {limit_s:.0f} s "
            f"({known}); set a smaller PREFILL_CHUNK or a larger STALL_SECONDS, or use a smaller "
            "model"
        )
