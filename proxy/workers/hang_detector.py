"""Detects a worker that is stuck: it says that it computes, and gets no step further."""

from hearth.shared.wire_messages import Heartbeat


class HangDetector:
    """Measures for how long one start of a worker has made no step. Owner: the event loop.

    It adds up the seconds that the supervisor has watched, so that it stands while nobody watches.
    Invariant: `stalled_s` is 0 while the worker loads, holds nothing, or has just made a step.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._steps = -1

    def tick(self, beat: Heartbeat | None, elapsed_s: float) -> float:
        """Take in the last heartbeat, `elapsed_s` after the tick before; return `stalled_s`.

        A worker that loads, or holds nothing, is not stuck.
        """
        assert elapsed_s >= 0, elapsed_s
        if beat is None or beat.state != "ready" or not beat.running + beat.waiting:
            self.stalled_s, self._steps = 0.0, -1
        elif beat.steps != self._steps:
            self.stalled_s, self._steps = 0.0, beat.steps
        else:
            self.stalled_s += elapsed_s
        return self.stalled_s
