"""Gives kept KV back while the system is short of memory; at the worst new prompts wait."""

import logging
from collections.abc import Callable
from typing import Any, Final

from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Failed
from hearth.worker.engine.system_state import Pressure
from hearth.worker.kv.memory_release import Reason, release_memory
from hearth.worker.schedule.memory_guard import AnyKVManager

LOOK_S: Final = 1.0  # between two looks at the system's level
SHED_SHARE: Final = 8  # of kept KV, 1 / 8 goes at each look
SHED_BYTES_MIN: Final = 1 << 26  # as much, where there is: little by little takes for ever
WAIT_S_MAX: Final = 60.0  # that a prompt waits for the system, then it is refused
RETRY_AFTER_S: Final = 30
GB: Final = 1024**3

log = logging.getLogger(__name__)


class PressureRelief:
    """Follows the system's memory pressure. Owner: the inference thread.

    At WARNING kept KV goes, bit by bit; the disk has it. At CRITICAL idle live caches go too, and
    no prompt begins that has not begun; those that run go on.
    """

    def __init__(
        self,
        holder: AnyKVManager | None = None,
        kept_bytes: Callable[[], int] = lambda: 0,
        level: Callable[[], Pressure] = lambda: Pressure.NORMAL,
        clock: Callable[[], float] = awake_s,
    ) -> None:
        """`kept_bytes` tells what the holder would give up before any live cache."""
        self._holder = holder
        self._kept_bytes = kept_bytes
        self._read_level = level
        self._clock = clock
        self._look_at = 0.0
        self.level = Pressure.NORMAL
        self._since = 0.0  # when it came to be so
        self.sheds = 0
        self.shed_bytes = 0

    def step(self) -> None:
        """Look at the system's level, where the last look is a while ago, and shed by it."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        before, self.level = self.level, self._read_level()
        if self.level != before:
            self._since = now
            log.warning("memory pressure of the system: %s", self.level.name.lower())
        if self.level > Pressure.NORMAL:
            if self._holder is not None:
                self._shed(self._holder)
            release_memory()

    def _shed(self, holder: AnyKVManager) -> None:
        is_critical = self.level == Pressure.CRITICAL
        there = holder.releasable() if is_critical else self._kept_bytes()
        nbytes = min(there, max(there // SHED_SHARE, SHED_BYTES_MIN))
        if nbytes <= 0:
            return
        before = holder.releasable()
        holder.release(nbytes, None, Reason.MEMORY if is_critical else Reason.WARNING)
        freed = max(0, before - holder.releasable())
        self.sheds += bool(freed)
        self.shed_bytes += freed
        log.info("kept KV is given back: %.2f GB of %.2f GB", freed / GB, there / GB)

    def holds_back(self) -> bool:
        """Whether a prompt that has not begun has to wait."""
        return self.level == Pressure.CRITICAL

    def has_waited(self, since: float) -> bool:
        """Whether a prompt that came at `since`, by `awake_s`, has waited long enough for this."""
        return self._clock() - max(since, self._since) > WAIT_S_MAX

    def refusal(self, request_id: str) -> Failed:
        """Return the answer to a prompt that has waited for the system's memory in vain."""
        text = (
            f"The system has been critically short of memory for {WAIT_S_MAX:.0f} s, and this "
            f"server has given back what it can ({self.shed_bytes / GB:.2f} GB of kept KV). "
            "Close other programs, serve a smaller model, or lower MEMORY_LIMIT_MB."
        )
        log.warning("no memory request=%s %s", request_id, text)
        return Failed(request_id, 503, "memory_pressure", text, RETRY_AFTER_S)

    def report(self) -> dict[str, Any]:
        """Return for /v1/cache the level, and what was given back for it."""
        return {
            "level": self.level.name.lower(),
            "severity": [*Pressure].index(self.level),
            "sheds": self.sheds,
            "shed_bytes": self.shed_bytes,
        }
