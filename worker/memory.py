"""Lets no request start that has no room, and gives room back where the answers outgrow it.

Owner: the inference thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

GB: Final = 1024**3
_UNLIMITED: Final = 1 << 62


class Holder(Protocol):
    """What holds KV and can give some up."""

    def release(self, nbytes: int) -> None: ...


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
