"""Remembers values by owner, so that no API key is served another key's data.

An owner is an API key's digest where there are several keys, else "". One owner never hits what
another owner stored, so that response times reveal nothing about it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def first_of_largest(costs_by_key: Iterable[tuple[str, K, int]]) -> K:
    """Return the first key of the owner with the highest total cost: the next key to evict.

    An owner with less than an equal share therefore loses nothing. There must be at least one
    (owner, key, cost).
    """
    costs = Counter[str]()
    firsts: dict[str, K] = {}
    for owner, key, cost in costs_by_key:
        costs[owner] += cost
        firsts.setdefault(owner, key)
    return firsts[max(costs, key=costs.__getitem__)]


class MemoryByOwner(Generic[K, V]):
    """Keeps the values of each owner in an LRU order, up to one total cost for all owners.

    When the total is exceeded, the owner that holds most loses its least recently used value. An
    owner with less than an equal share therefore loses nothing to others.
    Invariants: `cost` is the sum over the kept values, at most `cost_max`; each owner has a value.
    Any thread: every method takes the lock.
    """

    def __init__(
        self, cost_max: int, cost_of: Callable[[K, V], int] = lambda _key, _value: 1
    ) -> None:
        """`cost_of` returns a value's cost: the same at each call, at least 1."""
        self.cost = 0
        self._cost_max = cost_max
        self._cost_of = cost_of
        self._values: dict[str, OrderedDict[K, V]] = {}
        self._costs: dict[str, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._values.values()))

    def get(self, owner: str, key: K) -> V | None:
        """Return the value that `owner` itself stored under `key`, or None."""
        with self._lock:
            values = self._values.get(owner)
            if values is None or key not in values:
                return None
            values.move_to_end(key)
            return values[key]

    def put(self, owner: str, key: K, value: V) -> None:
        """Store a value, unless the key has one. A value above the total cost is not kept."""
        with self._lock:
            values = self._values.setdefault(owner, OrderedDict())
            if key in values:
                return
            values[key] = value
            self._count(owner, self._cost_of(key, value))
            while self.cost > self._cost_max:
                self._drop_one(max(self._costs, key=self._costs.__getitem__))
            assert bool(self.cost) == bool(self._values), (self.cost, len(self._values))

    def drop(self, is_over: Callable[[V], bool]) -> None:
        """Remove the values for which `is_over` is true; `is_over` is called without the lock."""
        with self._lock:
            entries = [
                (owner, *item) for owner, kept in self._values.items() for item in kept.items()
            ]
        for owner, key, value in entries:
            if is_over(value):
                with self._lock:
                    values = self._values.get(owner)
                    if values is not None and values.get(key) is value:
                        values.move_to_end(key, last=False)
                        self._drop_one(owner)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._costs.clear()
            self.cost = 0

    def _drop_one(self, owner: str) -> None:
        key, value = self._values[owner].popitem(last=False)
        self._count(owner, -self._cost_of(key, value))
        if not self._values[owner]:
            del self._values[owner], self._costs[owner]

    def _count(self, owner: str, cost: int) -> None:
        self.cost += cost
        self._costs[owner] = self._costs.get(owner, 0) + cost
        assert self._costs[owner] >= 0, (owner, self._costs[owner])
