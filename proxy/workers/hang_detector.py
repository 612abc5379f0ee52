"""Whether a worker is stuck: it says that it computes, and gets no step further."""

from hearth.shared.wire_messages import Heartbeat


class HangDetector:
    """How long one start of a worker has made no step. Owner: the event loop.

    It runs on what the watch has seen pass, so that it stands while nobody watches.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._steps = -1

    def tick(self, beat: Heartbeat | None, elapsed_s: float) -> float:
        """Take in the last heartbeat, `elapsed_s` after the tick before; return `stalled_s`.

        A worker that loads, or holds nothing, is not stuck.
        """
        if beat is None or beat.state != "ready" or not beat.running + beat.waiting:
            self.stalled_s, self._steps = 0.0, -1
        elif beat.steps != self._steps:
            self.stalled_s, self._steps = 0.0, beat.steps
        else:
            self.stalled_s += elapsed_s
        return self.stalled_s
