"""Makes lines of the values of all rounds, and tells which of them differ by more than chance.

A line is one measure of one workload, model and server. Two lines are told apart by an exact
Mann-Whitney test at 5 %, and where their medians differ by the measure's `least` or more. Four
rounds are the fewest that can tell anything apart. No test is corrected for how many there are: of
equal lines 3.2 % are told apart in five rounds.

What is no fair comparison is none: a line with failed requests, and speeds of answers that had to
obey a schema where not all of them do, for other text is other work.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from hearth.commands.bench.measures import MEASURES, Measure
from hearth.commands.bench.results import HEARTH, Cell, Results

P_MAX: Final = 0.05
ROUNDS_MIN: Final = 4  # with fewer, no order of values is rarer than 1 in 20
COLD_SUFFIX: Final = "-cold"  # of the workload whose answers are those without a cache
# What depends on the text of the answers.
_OF_ANSWERS: Final = {"tokens_s", "forwards_per_token", "gap_p50_s", "gap_p99_s"}


class Standing(StrEnum):
    """How another server stands to Hearth on one line."""

    BETTER = "better"
    SAME = "same"  # it can't be told apart
    WORSE = "worse"
    OTHER = "other"  # it is not compared: requests failed, or other work was done


@dataclass(frozen=True, slots=True)
class Line:
    """One measure over all rounds."""

    values: tuple[float, ...]
    is_fair: bool = True  # it is compared with other lines

    @property
    def median(self) -> float:
        return float(statistics.median(self.values))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of Hearth beside that of another server."""

    model: str
    workload: str
    measure: Measure
    server: str
    own: Line
    other: Line
    standing: Standing


def line(results: Results, model: str, server: str, workload: str, measure: str) -> Line | None:
    """Return one line; None where it was not measured."""
    cell = results.cell(model, server, workload)
    values = cell.numbers(measure)
    if measure == "same_answers" and not values:
        values = _same_answers(cell, results.cell(model, server, workload + COLD_SUFFIX))
    if not values:
        return None
    is_other_text = measure in _OF_ANSWERS and any(each < 1 for each in cell.numbers("valid_share"))
    return Line(tuple(values), is_fair=not any(cell.numbers("failed")) and not is_other_text)


def lines(results: Results) -> dict[tuple[str, str, str, str], Line]:
    """Return all lines by model, server, workload and name of the measure."""
    found = ((*place, measure) for place in results.places() for measure in MEASURES)
    return {key: each for key in found if (each := line(results, *key)) is not None}


def read_over(
    results: Results, model: str, server: str, workloads: Sequence[str], whole: str
) -> float | None:
    """Return what was read in some workloads over `whole` of them; None where it is not known.

    The ideal is Hearth's for all: nobody else tells which tokens a prompt has.
    """
    taken = [line(results, model, server, each, "read_tokens") for each in workloads]
    asked = HEARTH if whole == "ideal_tokens" else server
    most = [line(results, model, asked, each, whole) for each in workloads]
    is_metered = server in results.servers and results.servers[server].is_metered
    if not is_metered or any(each is None or not each.is_fair for each in (*taken, *most)):
        return None
    total = sum(each.median for each in most if each)
    return sum(each.median for each in taken if each) / total if total else None


def _same_answers(warm: Cell, cold: Cell) -> list[float]:
    """Return for each round which share of the answers are those of no cache.

    An answer without a digest, on either side, is left out.
    """
    without = next(iter(cold.digests.values()), [])
    found = []
    for digests in warm.digests.values():
        pairs = [pair for pair in zip(digests, without, strict=False) if all(pair)]
        found += [sum(one == other for one, other in pairs) / len(pairs)] if pairs else []
    return found


# ---------------------------------------------------------------- comparing


def comparisons(results: Results) -> Iterator[Comparison]:
    """Yield each line of Hearth beside each other server's, by measure and workload."""
    every = lines(results)
    for measure in MEASURES.values():
        for (model, server, workload, name), other in every.items():
            own = every.get((model, HEARTH, workload, name))
            is_compared = measure.is_more_better is not None and server != HEARTH
            if name == measure.name and is_compared and own is not None:
                found = standing(own, other, measure)
                yield Comparison(model, workload, measure, server, own, other, found)


def standing(own: Line, other: Line, measure: Measure) -> Standing:
    """Return how the server of the line `other` stands to Hearth."""
    if not (own.is_fair and other.is_fair):
        return Standing.OTHER
    difference = other.median - own.median
    if difference == 0 or abs(difference) < measure.least:
        return Standing.SAME
    if mann_whitney(own.values, other.values) >= P_MAX:
        return Standing.SAME
    is_better = (difference > 0) == bool(measure.is_more_better)
    return Standing.BETTER if is_better else Standing.WORSE


def mann_whitney(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the two-sided probability that equals differ in ranks by so much; 1 without values.

    It is exact, with ties: over all ways to part the values in two groups.
    """
    ordered = sorted([*one, *other])
    # Twice the rank of each value, from 2; equal values share the middle of theirs.
    last = {value: place for place, value in enumerate(ordered, start=1)}
    doubled = {value: ordered.index(value) + 1 + place for value, place in last.items()}
    mean = len(one) * (len(ordered) + 1)
    far = abs(sum(doubled[value] for value in one) - mean)
    ways = _ways(tuple(doubled[value] for value in ordered), len(one))
    return sum(many for total, many in ways.items() if abs(total - mean) >= far) / sum(
        ways.values()
    )


@lru_cache(maxsize=1_000)  # values without ties have the same ranks
def _ways(ranks: tuple[int, ...], count: int) -> dict[int, int]:
    """Return in how many ways `count` of the ranks make each sum."""
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(count))]  # by how many are drawn
    for rank in ranks:
        for drawn in range(count, 0, -1):
            for total, number in ways[drawn - 1].items():
                ways[drawn][total + rank] = ways[drawn].get(total + rank, 0) + number
    return ways[count]


def moved(before: Results, after: Results) -> tuple[list[str], int]:
    """Return what each line says whose median of each run lies outside the other, and of how many.

    Lines that only one of them has are left out, and differences that no measure minds.
    """
    told, earlier, later = [], lines(before), lines(after)
    for key in earlier.keys() & later.keys():
        old, new, measure = earlier[key], later[key], MEASURES[key[-1]]
        is_apart = not min(old.values) <= new.median <= max(old.values)
        is_apart &= not min(new.values) <= old.median <= max(new.values)
        if is_apart and abs(old.median - new.median) >= measure.least:
            where = f"{', '.join(key[:-1])}: {measure.label}"
            told.append(f"{where} {old.median:g} -> {new.median:g} {measure.unit}")
    return sorted(told), len(earlier.keys() & later.keys())
