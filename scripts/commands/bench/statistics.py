"""Makes lines of the samples of all rounds, and tells which of them differ by more than chance.

A line is one measure of one workload, model and server. Two lines are told apart by an exact
Mann-Whitney test at 5 %, and where their medians differ by the measure's `least` or more. Four
rounds are the fewest that can tell anything apart. Of a hundred comparisons of equal servers, five
pass the test by chance, fewer where `least` holds them back.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from hearth.commands.bench.measures import MEASURES, Measure
from hearth.commands.bench.results import HEARTH, Results, Sample

P_MAX: Final = 0.05
IDEAL_TOKENS_MIN: Final = 64  # of a workload whose ideal is smaller, a few tokens are many times
COLD_SUFFIX: Final = "-cold"  # of the workload whose answers are those without a cache
_OF_READING: Final = ("read_tokens", "read_over_ideal", "read_per_prompt")
# What is compared although requests failed: with less to do all else looks better than it is.
_IN_SPITE_OF_FAILURES: Final = {"failed", "same_answers", "valid_share", "start_s"}


@dataclass(frozen=True, slots=True)
class Line:
    """One measure over all rounds. `low` and `high` are the least and the most of them."""

    values: tuple[float, ...]
    median: float
    low: float
    high: float
    is_claimed: bool = False  # what the server says it read: the meter cannot enter it
    failed: int = 0  # requests, of all rounds

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the first and the third quartile."""
        if len(self.values) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Return the range of the values as a share of their median; 0 where that is 0."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0


class Verdict(StrEnum):
    """How Hearth stands to another server on one line."""

    AHEAD = "ahead"
    BEHIND = "behind"
    SAME = "can't be told apart"


@dataclass(frozen=True, slots=True)
class MovedLine:
    """A line that differs between two runs by more than the spread of either."""

    model: str
    server: str
    workload: str
    measure: str
    before: Line
    after: Line


def line_of(values: Sequence[float], is_claimed: bool = False, failed: int = 0) -> Line | None:
    """Return the line of `values`, None of none."""
    if not values:
        return None
    median = float(statistics.median(values))
    return Line(tuple(values), median, min(values), max(values), is_claimed, failed)


def line(results: Results, model: str, server: str, workload: str, measure: str) -> Line | None:
    """Return one line; None where it was not measured, or means nothing for the workload."""
    samples = results.of(model, server, workload)
    ideal = _ideal(results, model, workload)
    cold = _cold(results, model, server, workload)
    found = [
        (sample, value)
        for sample in samples
        if (value := _value(sample, measure, ideal, cold)) is not None
    ]
    facts = results.servers.get(server)
    is_claimed = measure in _OF_READING and (
        (facts is not None and not facts.is_metered)
        or any("read_tokens" not in sample.values for sample, _ in found)
    )
    failed = sum(int(sample.values.get("failed", 0)) for sample, _ in found)
    return line_of([value for _, value in found], is_claimed, failed)


def lines(results: Results) -> Iterator[tuple[str, str, str, str, Line]]:
    """Yield model, server, workload, measure and line of all that was measured."""
    # A line is looked for in the samples that it may need, not in all of a run.
    parts: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for each in results.samples:
        parts[each.model, each.workload.removesuffix(COLD_SUFFIX)].append(each)
    keys = dict.fromkeys((each.model, each.server, each.workload) for each in results.samples)
    for model, server, workload in keys:
        part = replace(results, samples=parts[model, workload.removesuffix(COLD_SUFFIX)])
        for measure in MEASURES:
            if (found := line(part, model, server, workload, measure)) is not None:
                yield model, server, workload, measure, found


# ---------------------------------------------------------------- values that follow from others


def _value(sample: Sample, measure: str, ideal: float | None, cold: Sequence[str]) -> float | None:
    if measure in sample.values:
        return sample.values[measure]
    read = sample.values.get("read_tokens", sample.values.get("claimed_tokens"))
    match measure:
        case "read_tokens":
            return read
        case "read_per_prompt":
            return _ratio(read, sample.values.get("prompt_tokens"), 1)
        case "read_over_ideal":
            own = sample.values.get("ideal_tokens", ideal)
            return _ratio(read, own, IDEAL_TOKENS_MIN)
        case "same_answers":
            return same_answers(sample.digests, cold)
    return None


def _ratio(part: float | None, whole: float | None, least: float) -> float | None:
    return None if part is None or whole is None or whole < least else part / whole


def _ideal(results: Results, model: str, workload: str) -> float | None:
    """Return the ideal that Hearth's samples tell, which holds for all servers."""
    told = [
        sample.values["ideal_tokens"]
        for sample in results.of(model, HEARTH, workload)
        if "ideal_tokens" in sample.values
    ]
    return statistics.median(told) if told else None


def _cold(results: Results, model: str, server: str, workload: str) -> tuple[str, ...]:
    samples = results.of(model, server, workload + COLD_SUFFIX)
    return samples[0].digests if samples else ()


def same_answers(warm: Sequence[str], cold: Sequence[str]) -> float | None:
    """Return which share of the answers are those of no cache; None where none can be compared.

    An answer without a digest, on either side, is left out.
    """
    pairs = [(one, other) for one, other in zip(warm, cold, strict=False) if one and other]
    return sum(one == other for one, other in pairs) / len(pairs) if pairs else None


# ---------------------------------------------------------------- comparing


def mann_whitney(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the two-sided probability that equals differ in ranks by so much; 1 without values.

    Exact, with ties: over all ways to part the values in two groups of these sizes.
    """
    ranks = doubled_ranks([*one, *other])
    count, mean = len(one), len(one) * (len(ranks) + 1)
    ways = _ways(tuple(sorted(ranks)), count)
    far = abs(sum(ranks[:count]) - mean)
    found = sum(number for total, number in ways.items() if abs(total - mean) >= far)
    return found / sum(ways.values())


@lru_cache(maxsize=1_000)  # values without ties have the same ranks
def _ways(ranks: tuple[int, ...], count: int) -> dict[int, int]:
    """Return in how many ways each sum comes of `count` of the ranks."""
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(count))]  # by how many are drawn
    for rank in ranks:
        for drawn in range(count, 0, -1):
            for total, number in ways[drawn - 1].items():
                ways[drawn][total + rank] = ways[drawn].get(total + rank, 0) + number
    return ways[count]


def doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the rank of each value, from 2; equal values share the middle of theirs."""
    ordered = sorted(values)
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for place, value in enumerate(ordered, start=1):
        first.setdefault(value, place)
        last[value] = place
    return [first[value] + last[value] for value in values]


def told_apart(one: Line, other: Line, measure: Measure) -> bool:
    """Return whether the lines differ by more than chance, and by enough to matter.

    Where requests failed, only what failures do not flatter is told apart.
    """
    if (one.failed or other.failed) and measure.name not in _IN_SPITE_OF_FAILURES:
        return False
    difference = abs(one.median - other.median)
    if difference == 0 or difference < measure.least:
        return False
    return mann_whitney(one.values, other.values) < P_MAX


def compared(
    results: Results, model: str, workload: str, measure: str, server: str
) -> Verdict | None:
    """Return how Hearth stands to `server`; None where one of them has no such line."""
    is_more_better = MEASURES[measure].is_more_better
    own = line(results, model, HEARTH, workload, measure)
    other = line(results, model, server, workload, measure)
    if own is None or other is None or is_more_better is None:
        return None
    if not told_apart(own, other, MEASURES[measure]):
        return Verdict.SAME
    return Verdict.AHEAD if (own.median > other.median) == is_more_better else Verdict.BEHIND


def moved(before: Results, after: Results) -> list[MovedLine]:
    """Return the lines whose median of each run lies outside all rounds of the other run.

    Lines that only one of them has are left out, and differences that no measure minds.
    """
    found = []
    later = {tuple(key): new for *key, new in lines(after)}
    for model, server, workload, measure, old in lines(before):
        new = later.get((model, server, workload, measure))
        if new is not None and _is_moved(old, new, MEASURES[measure].least):
            found.append(MovedLine(model, server, workload, measure, old, new))
    return found


def _is_moved(old: Line, new: Line, least: float) -> bool:
    is_apart = not old.low <= new.median <= old.high and not new.low <= old.median <= new.high
    return is_apart and abs(old.median - new.median) >= least
