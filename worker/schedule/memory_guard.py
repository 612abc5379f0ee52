"""Admits requests within the memory limit, and frees kept KV where running answers outgrow it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.kv.kv_manager import KVManager, NullKVManager

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
