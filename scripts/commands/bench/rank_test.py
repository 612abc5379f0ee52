"""Says how likely chance alone makes two lines differ, by the order of their values alone.

The test is Mann and Whitney's, exact, with ties: over all ways to part the values in two groups.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import comb
from typing import Final

P_MAX: Final = 0.05


def mann_whitney(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the two-sided probability that equals differ in ranks by so much; 1 without values."""
    ranks = doubled_ranks([*one, *other])
    far = abs(sum(ranks[: len(one)]) - _mean(len(one), len(ranks)))
    ways = _ways(tuple(sorted(ranks)), len(one))
    return _share(ways, _mean(len(one), len(ranks)), far)


@cache
def chance_told_apart(one: int, other: int) -> float:
    """Return how likely lines of so many values are told apart where nothing differs.

    Ties and a measure's `least` make it less. Few values can be parted in few ways, so that it is
    less than P_MAX: 3.2 % of five and five, 2.9 % of four and four, nothing of three and three.
    """
    ranks = doubled_ranks(range(one + other))
    mean, ways = _mean(one, len(ranks)), _ways(tuple(ranks), one)
    told = (
        number
        for total, number in ways.items()
        if _share(ways, mean, abs(total - mean)) < P_MAX
    )  # fmt: skip
    return sum(told) / sum(ways.values())


def chance_moved(one: int, other: int) -> float:
    """Return how likely each median lies outside all values of the other where nothing differs.

    Of an even number it is the most, for their median depends on more than their order.
    """
    if not one or not other:
        return 0.0
    return min(1.0, 2 * comb(one // 2 + other // 2, one // 2) / comb(one + other, one))


def doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, from 2; equal values share the middle of theirs."""
    ordered = sorted(values)
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for place, value in enumerate(ordered, start=1):
        first.setdefault(value, place)
        last[value] = place
    return [first[value] + last[value] for value in values]


def _mean(count: int, all_values: int) -> int:
    """Return the mean of a sum of so many doubled ranks."""
    return count * (all_values + 1)


@lru_cache(maxsize=1_000)  # values without ties have the same ranks
def _ways(ranks: tuple[int, ...], count: int) -> dict[int, int]:
    """Return in how many ways `count` of the ranks make each sum."""
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(count))]  # by how many are drawn
    for rank in ranks:
        for drawn in range(count, 0, -1):
            for total, number in ways[drawn - 1].items():
                ways[drawn][total + rank] = ways[drawn].get(total + rank, 0) + number
    return ways[count]


def _share(ways: dict[int, int], mean: int, far: int) -> float:
    """Return the share of ways whose sum is so far from the mean, or farther."""
    found = sum(number for total, number in ways.items() if abs(total - mean) >= far)
    return found / sum(ways.values())
