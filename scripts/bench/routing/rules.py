"""Rules by which a worker could be chosen, to be measured beside the one that is used."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from hearth.proxy.pool.cache_affinity import CacheAffinity, Candidate

C = TypeVar("C", bound=Candidate)


class RoundRobin(CacheAffinity):
    """Gives each worker a request in turn."""

    _number = 0

    def choose(self, candidates: Iterable[C], marks: list[bytes]) -> C | None:
        ready = sorted(candidates, key=lambda row: row.worker_id)
        if not ready:
            return None
        self._number += 1
        return ready[self._number % len(ready)]


class LeastBusy(CacheAffinity):
    """Gives a request to the worker with fewest in flight, the first one among equals.

    Source: LiteLLM 1.106, strategy "least-busy" of its router.
    """

    def choose(self, candidates: Iterable[C], marks: list[bytes]) -> C | None:
        return min(candidates, key=lambda row: (row.load, row.worker_id), default=None)


def _with_gap(load_gap: int) -> Callable[[int], CacheAffinity]:
    """Return today's rule with another bound on how much busier the best worker may be."""
    return lambda _load_gap_max: CacheAffinity(load_gap)


TODAY: Final = "today"
# Each is made with the gap that the server's settings give.
RULES: Final[Mapping[str, Callable[[int], CacheAffinity]]] = {
    TODAY: CacheAffinity,
    "round_robin": RoundRobin,
    "least_busy": LeastBusy,
    "gap_1": _with_gap(1),
    "gap_8": _with_gap(8),
}
