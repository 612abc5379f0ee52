"""Lets no request start that has no room, and gives room back where the answers outgrow it.

Owner: the inference thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from worker.cache.index import Query

GB: Final = 1024**3
_UNLIMITED: Final = 1 << 62


class Holder(Protocol):
    """What holds KV and can give some up."""

    def releasable(self, spared: Query | None = None) -> int: ...

    def release(self, nbytes: int, spared: Query | None = None) -> None: ...


def _none() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class MemoryGuard:
    """The limit in bytes, weights included, and what tells how much is held now."""

    limit: int = _UNLIMITED
    used: Callable[[], int] = _none

    def over(self, nbytes: int = 0) -> int:
        """Return how many bytes are missing for `nbytes` more; 0 where they fit."""
        return max(0, self.used() + nbytes - self.limit)

    def admits(
        self, holder: Holder, query: Query, cost: Callable[[], int], cold_cost: int, is_last: bool
    ) -> tuple[bool, int]:
        """Make room for a prompt; say whether there is, and how many bytes it takes.

        `cost()` is what it takes now, `cold_cost` what it does once nothing is kept of it. That
        goes last, and only where nobody runs whose end would make room (`is_last`). Where what may
        go would not do, nothing goes.
        """
        for spared in (query, None) if is_last else (query,):
            missing = self.over(cost() if spared is not None else cold_cost)
            if 0 < missing <= holder.releasable(spared):
                holder.release(missing, spared)
            if not self.over(cost()):
                return True, cost()
        return False, cost()

    def makes_room(self, holder: Holder, nbytes: int) -> bool:
        """Give up kept KV until `nbytes` more fit; say whether they do."""
        missing = self.over(nbytes)
        if missing:
            holder.release(missing)
            missing = self.over(nbytes)
        return not missing

    def refusal(self, prompt_tokens: int, nbytes: int) -> str:
        """Return what a client is told whose prompt has no room though nobody else runs."""
        free = max(0, self.limit - self.used())
        return (
            f"The prompt is {prompt_tokens:,} tokens, whose KV takes {nbytes / GB:.2f} GB, and "
            f"{free / GB:.2f} GB of this server's {self.limit / GB:.2f} GB are free beside the "
            "model. Send a shorter prompt, set KV_BITS=8, or raise MEMORY_LIMIT_MB."
        )
