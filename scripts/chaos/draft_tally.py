"""Counts the tokens that a server's workers drafted in a run, though workers end amid it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

COUNTED: Final = ("drafted", "accepted")


@dataclass(slots=True)
class DraftTally:
    """Sums what each reading of `/v1/cache` tells more than the one before it.

    A worker that is started anew counts from 0: what its predecessor counted since the last
    reading is lost, so that the sums are what was drafted at least.
    """

    total: Counter[str] = field(default_factory=Counter)
    _last: dict[Any, Counter[str]] = field(default_factory=dict)

    def take(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Take in the workers' rows of one reading; rows that tell no drafts are passed over."""
        for row in workers:
            sources = row.get("speculation", {}).get("by_source", {})
            if not sources:
                continue
            now = Counter({name: sum(told[name] for told in sources.values()) for name in COUNTED})
            last = self._last.get(row.get("worker"), Counter())
            is_new = any(now[name] < last[name] for name in COUNTED)
            self.total += now if is_new else now - last
            self._last[row.get("worker")] = now


def drafts_line(total: Mapping[str, int]) -> str:
    """Return the sums of a `DraftTally` as people read them."""
    drafted, accepted = (total.get(name, 0) for name in COUNTED)
    return f"at least {drafted:,} tokens were drafted, {accepted:,} of them accepted"
