"""Remembers values by who they belong to, so that nobody is served what another has said.

An owner is an API key's digest where there are several keys, and "" for everybody where there are
not. What one owner had remembered costs another as much as if nobody had ever said it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def first_of_largest(rows: Iterable[tuple[str, K, int]]) -> K:
    """Return the first key of the owner whose rows (owner, key, cost) cost most: what goes first.

    So who holds less than an equal share loses nothing. There is a row.
    """
    costs = Counter[str]()
    firsts: dict[str, K] = {}
    for owner, key, cost in rows:
        costs[owner] += cost
        firsts.setdefault(owner, key)
    return firsts[max(costs, key=costs.__getitem__)]


class MemoryByOwner(Generic[K, V]):
    """The values of each owner, the least recently used first, up to a cost of all together.

    Where room is short, the owner that holds most gives up what it used least recently. So one
    that holds less than an equal share loses nothing by what others say.
    Invariants: `cost` is the sum over what is kept, at most `cost_max`; each owner has something.
    Any thread: all happens under a lock.
    """

    def __init__(
        self, cost_max: int, cost_of: Callable[[K, V], int] = lambda _key, _value: 1
    ) -> None:
        """`cost_of` gives a value's cost: the same each time, at least 1."""
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
        """Return what `owner` had remembered; None where that is nothing, whoever else had."""
        with self._lock:
            values = self._values.get(owner)
            if values is None or key not in values:
                return None
            values.move_to_end(key)
            return values[key]

    def put(self, owner: str, key: K, value: V) -> None:
        """Remember a value, unless another thread has. One that costs too much is not kept."""
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
        """Forget the values that are over; that is asked of each without the lock."""
        with self._lock:
            rows = [(owner, *row) for owner, kept in self._values.items() for row in kept.items()]
        for owner, key, value in rows:
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
