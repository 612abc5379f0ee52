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
WARN_SHARE: Final = 0.8  # of a budget
_UNLIMITED: Final = 1 << 62

AnyKVManager = KVManager | NullKVManager  # gives requests slots, and memory back

log = logging.getLogger(__name__)


def _none(_depth: int = 0) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Tells the bytes that a prompt takes once it has a slot."""

    now: Callable[[], int]  # as things are
    cold: int  # once nothing is kept of it
    growth: int = 0  # what answers are still to take: it is enough that for this something can go
    copied: Callable[[], int] = _none  # of what is kept of it: may go once the slot has it too


@dataclass(slots=True)
class Watermark:
    """Warns once in the log that a budget is nearly used up. Owner: the inference thread."""

    what: str  # is held
    setting: str  # that raises the budget
    used: Callable[[], int]
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
    """Compares the bytes held now with the limit, weights included. Owner: the inference thread.

    It holds no state: what is held is measured anew for each question. `forward` tells what the
    last forward of a prompt of so many tokens takes, and gives back at its end.
    """

    limit: Callable[[], int] = lambda: _UNLIMITED
    used: Callable[[], int] = _none
    forward: Callable[[int], int] = _none
    overhead: Callable[[], float] = lambda: 0.0  # bytes beside each one that is asked for

    def over(self, nbytes: int = 0, depth: int = 0) -> int:
        """Return how many bytes are missing for `nbytes` more, beside a forward; 0 = they fit.

        `depth` is the length in tokens of the longest prompt that is being read.
        """
        asked = round(nbytes * (1 + self.overhead())) + self.forward(depth)
        return max(0, self.used() + asked - self.limit())

    def admits(
        self,
        holder: AnyKVManager,
        query: PrefixQuery,
        cost: PromptCost,
        is_last: bool,
        depth: int = 0,
    ) -> tuple[bool, int]:
        """Free memory for a prompt; say whether there is enough, and how many bytes it takes.

        What the prompt goes on from goes last, and only where nobody runs whose end would make
        room (`is_last`). It has to fit beside its copy in the slot, not beside a forward too.
        Where what may go would not do, nothing goes.
        """
        needed, copied = cost.now(), cost.copied()
        assert min(needed, cost.cold, copied) >= 0, (needed, cost.cold, copied)
        for spared in (query, None) if is_last else (query,):
            missing = self.over(cost.cold, depth)
            if spared is not None:
                missing = max(self.over(needed), self.over(needed - copied, depth))
            if 0 < missing <= holder.releasable(spared):
                holder.release(missing, spared)
                needed, copied = cost.now(), cost.copied()
            if not self.over(needed) and not self.over(needed - copied, depth):
                later = self.over(needed - copied + cost.growth, depth)
                return not later or later <= holder.releasable(spared), needed
        return False, needed

    def makes_room(self, holder: AnyKVManager, nbytes: int, depth: int = 0) -> bool:
        """Give up kept KV until `nbytes` more fit beside a forward; say whether they do."""
        assert nbytes >= 0, nbytes
        missing = self.over(nbytes, depth)
        if missing:
            holder.release(missing)
            missing = self.over(nbytes, depth)
        return not missing

    def refusal(self, prompt_tokens: int, nbytes: int) -> str:
        """Return the error text for a prompt that has no room though no other request runs."""
        limit, forward = self.limit(), self.forward(prompt_tokens)
        free = max(0, limit - self.used())
        return (
            f"The prompt is {prompt_tokens:,} tokens, whose KV takes {nbytes / GB:.2f} GB and "
            f"whose reading takes {forward / GB:.2f} GB more, and {free / GB:.2f} GB of this "
            f"server's {limit / GB:.2f} GB are free beside the model. Send a shorter prompt, set "
            "KV_BITS=8, or raise MEMORY_LIMIT_MB."
        )


LOOK_S: Final = 1.0  # between two looks at the system's level
SHED_SHARE: Final = 8  # of kept KV, 1 / 8 goes at each look
SHED_BYTES_MIN: Final = 1 << 26  # as much, where there is: little by little takes for ever
WAIT_S_MAX: Final = 60.0  # that a prompt waits for the system, then it is refused
RETRY_AFTER_S: Final = 30


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
