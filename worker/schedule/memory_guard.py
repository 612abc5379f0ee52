"""Admits requests within the memory limit, and frees kept KV for answers and for other programs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Failed
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.system_state import Pressure
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.kv.memory_release import Reason, release_memory

GB: Final = 1024**3
WARN_SHARE: Final = 0.8  # a warning is logged if more than this share of a budget is used
_UNLIMITED: Final = 1 << 62

AnyKVManager = KVManager | NullKVManager

log = logging.getLogger(__name__)


def _none(_depth: int = 0) -> int:
    return 0


@dataclass(slots=True)
class Watermark:
    """Warns once in the log that a budget is nearly used up. Owner: the inference thread."""

    what: str  # name of the budget
    setting: str  # name of the setting that raises the budget
    used: Callable[[], int]  # bytes
    limit: Callable[[], int]  # bytes
    has_warned: bool = False

    def check(self) -> None:
        used, limit = self.used(), self.limit()
        if self.has_warned or used <= WARN_SHARE * limit:
            return
        self.has_warned = True
        log.warning(
            "%s: %.2f of %.2f GB are used, over %.0f %%; soon what saves the fewest tokens makes "
            "way (hearth_evictions_total in /metrics). Raise %s if prompts are read again.",
            self.what,
            used / GB,
            limit / GB,
            WARN_SHARE * 100,
            self.setting,
        )


@dataclass(frozen=True, slots=True)
class MemoryGuard:
    """Compares the bytes in use, weights included, with the limit. Owner: the inference thread.

    It holds no state: each call measures the bytes in use anew. `forward` maps a prompt's length in
    tokens to the temporary bytes of the prompt's last forward.
    """

    limit: Callable[[], int] = lambda: _UNLIMITED
    used: Callable[[], int] = _none
    forward: Callable[[int], int] = _none
    overhead: Callable[[], float] = lambda: 0.0  # further bytes per requested byte

    def over(self, nbytes: int = 0, depth: int = 0) -> int:
        """Return how many bytes are missing for `nbytes` more and a forward; 0 = none.

        `depth` is the length in tokens of the longest prompt in prefill.
        """
        asked = round(nbytes * (1 + self.overhead())) + self.forward(depth)
        return max(0, self.used() + asked - self.limit())

    def admits(
        self,
        kv_manager: AnyKVManager,
        query: PrefixQuery,
        *,
        now: Callable[[], int],
        cold: int,
        growth: int,
        copied: Callable[[], int],
        is_last: bool,
        depth: int,
    ) -> tuple[bool, int]:
        """Free memory for a prompt; return whether the prompt fits, and how many bytes it takes.

        The prompt takes `now()` bytes with its present kept KV, and `cold` bytes without kept KV.
        Once the slot has copied the kept KV, `copied()` bytes may be released. `growth` are the
        bytes that answers will still take; releasable KV may make room for this growth.

        The prompt's own kept KV is released last, and only if no other request runs (`is_last`),
        since the end of a running request would free memory too. The kept KV must fit together with
        its copy in the slot; a forward need not fit beside both. If all releasable KV is too
        little, nothing is released.
        """
        needed, twice = now(), copied()
        assert min(needed, cold, twice) >= 0, (needed, cold, twice)
        for spared in (query, None) if is_last else (query,):
            missing = self.over(cold, depth)
            if spared is not None:
                missing = max(self.over(needed), self.over(needed - twice, depth))
            if 0 < missing <= kv_manager.releasable(spared):
                kv_manager.release(missing, spared)
                needed, twice = now(), copied()
            if not self.over(needed) and not self.over(needed - twice, depth):
                later = self.over(needed - twice + growth, depth)
                return not later or later <= kv_manager.releasable(spared), needed
        return False, needed

    def makes_room(self, kv_manager: AnyKVManager, nbytes: int, depth: int = 0) -> bool:
        """Release kept KV until `nbytes` more and a forward fit; return whether both fit."""
        assert nbytes >= 0, nbytes
        missing = self.over(nbytes, depth)
        if missing:
            kv_manager.release(missing)
            missing = self.over(nbytes, depth)
        return not missing

    def refusal(self, prompt_tokens: int, nbytes: int) -> str:
        """Return the error text for a prompt that does not fit although no other request runs."""
        limit, forward = self.limit(), self.forward(prompt_tokens)
        free = max(0, limit - self.used())
        return (
            f"The prompt is {prompt_tokens:,} tokens, whose KV takes {nbytes / GB:.2f} GB and "
            f"whose reading takes {forward / GB:.2f} GB more, and {free / GB:.2f} GB of this "
            f"server's {limit / GB:.2f} GB are free beside the model. Send a shorter prompt, set "
            "KV_BITS=8, or raise MEMORY_LIMIT_MB."
        )


LOOK_S: Final = 1.0  # seconds between two readings of the system's memory pressure
SHED_SHARE: Final = 8  # each reading releases one eighth of the kept KV
SHED_BYTES_MIN: Final = 1 << 26  # least bytes per reading; smaller steps would take too long
WAIT_S_MAX: Final = 60.0  # seconds that a prompt waits for the system before a refusal
RETRY_AFTER_S: Final = 30


class PressureRelief:
    """Follows the system's memory pressure. Owner: the inference thread.

    At WARNING kept KV is released step by step; the copies on disk stay. At CRITICAL idle live
    caches are released too, and no new prompt begins; running requests go on.
    """

    def __init__(
        self,
        kv_manager: AnyKVManager | None = None,
        kept_bytes: Callable[[], int] = lambda: 0,
        level: Callable[[], Pressure] = lambda: Pressure.NORMAL,
        clock: Callable[[], float] = awake_s,
    ) -> None:
        """`kept_bytes` returns the bytes that the KV manager can release before any live cache."""
        self._kv_manager = kv_manager
        self._kept_bytes = kept_bytes
        self._read_level = level
        self._clock = clock
        self._look_at = 0.0  # time of the next reading
        self.level = Pressure.NORMAL
        self._since = 0.0  # time of the last change of `level`
        self.sheds = 0
        self.shed_bytes = 0

    def step(self) -> None:
        """Read the system's memory pressure every LOOK_S, and release memory accordingly."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        before, self.level = self.level, self._read_level()
        if self.level != before:
            self._since = now
            log.warning("memory pressure of the system: %s", self.level.name.lower())
        if self.level > Pressure.NORMAL:
            if self._kv_manager is not None:
                self._shed(self._kv_manager)
            release_memory()

    def _shed(self, kv_manager: AnyKVManager) -> None:
        is_critical = self.level == Pressure.CRITICAL
        releasable = kv_manager.releasable() if is_critical else self._kept_bytes()
        nbytes = min(releasable, max(releasable // SHED_SHARE, SHED_BYTES_MIN))
        if nbytes <= 0:
            return
        before = kv_manager.releasable()
        kv_manager.release(nbytes, None, Reason.MEMORY if is_critical else Reason.WARNING)
        freed = max(0, before - kv_manager.releasable())
        self.sheds += bool(freed)
        self.shed_bytes += freed
        log.info("kept KV is given back: %.2f GB of %.2f GB", freed / GB, releasable / GB)

    def holds_back(self) -> bool:
        """Return whether prompts that have not begun have to wait."""
        return self.level == Pressure.CRITICAL

    def has_waited(self, since: float) -> bool:
        """Return whether a prompt that came at `since` has waited too long for memory."""
        return self._clock() - max(since, self._since) > WAIT_S_MAX

    def refusal(self, request_id: str) -> Failed:
        """Return the refusal of a prompt that waited too long for the system's memory."""
        text = (
            f"The system has been critically short of memory for {WAIT_S_MAX:.0f} s, and this "
            f"server has given back what it can ({self.shed_bytes / GB:.2f} GB of kept KV). "
            "Close other programs, serve a smaller model, or lower MEMORY_LIMIT_MB."
        )
        log.warning("no memory request=%s %s", request_id, text)
        return Failed(request_id, 503, "memory_pressure", text, RETRY_AFTER_S)

    def report(self) -> dict[str, Any]:
        """Return the pressure level and the released bytes, for /v1/cache."""
        return {
            "level": self.level.name.lower(),
            "severity": [*Pressure].index(self.level),
            "sheds": self.sheds,
            "shed_bytes": self.shed_bytes,
        }
