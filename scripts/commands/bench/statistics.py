"""Makes lines of the samples of all rounds, and tells which of them differ by more than chance.

A line is one measure of one workload, model and server. Two lines are told apart by an exact
Mann-Whitney test at 5 %, and where their medians differ by the measure's `least` or more. Four
rounds are the fewest that can tell anything apart. No test is corrected for how many there are:
`rank_test.chance_told_apart` says how many pass by chance, and the page tells it.

What is no fair comparison is none. Lines with failed requests are compared only by what failures do
not flatter. Without Metal, for which all other servers are written, one that answers nothing of a
workload is not held to have failed. Speeds of answers that had to obey a schema are compared only
where all of them do: other text is other work.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hearth.commands.bench.measures import MEASURES, Measure
from hearth.commands.bench.rank_test import P_MAX, mann_whitney
from hearth.commands.bench.results import HEARTH, Results, Sample

IDEAL_TOKENS_MIN: Final = 64  # of a workload whose ideal is smaller, a few tokens are many times
COLD_SUFFIX: Final = "-cold"  # of the workload whose answers are those without a cache
_OF_READING: Final = ("read_tokens", "read_over_ideal", "read_per_prompt")
# Of these, what says of two servers what `read_tokens` says: counted too, it would count thrice.
REPEATED: Final = frozenset(_OF_READING[1:])
# What depends on the text of the answers.
_OF_ANSWERS: Final = {"tokens_s", "forwards_per_token", "gap_p50_s", "gap_p99_s"}
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
    is_unlike: bool = False  # told, and not compared: it did other work, or could do none here


@dataclass(frozen=True, slots=True)
class MovedLine:
    """One line in two runs; one that `moved` returns differs by more than the spread of either."""

    model: str
    server: str
    workload: str
    measure: str
    before: Line
    after: Line


def line_of(
    values: Sequence[float], is_claimed: bool = False, failed: int = 0, is_unlike: bool = False
) -> Line | None:
    """Return the line of `values`, None of none."""
    if not values:
        return None
    median = float(statistics.median(values))
    return Line(tuple(values), median, min(values), max(values), is_claimed, failed, is_unlike)


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
    is_unlike = (server != HEARTH and _needs_metal(results, samples)) or (
        measure in _OF_ANSWERS and any(each.values.get("valid_share", 1) < 1 for each in samples)
    )
    return line_of([value for _, value in found], is_claimed, failed, is_unlike)


def _needs_metal(results: Results, samples: Sequence[Sample]) -> bool:
    """Return whether a workload of which a server never answered anything may need a Mac."""
    played = [each.values for each in samples if each.values]
    return bool(
        "linux" in results.machine.lower()
        and played
        and all(each.get("failed", 0) and not each.get("requests", 0) for each in played)
    )


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


def told_apart(one: Line, other: Line, measure: Measure) -> bool:
    """Return whether the lines differ by more than chance, and by enough to matter.

    Where requests failed, only what failures do not flatter is told apart.
    """
    if one.is_unlike or other.is_unlike:
        return False
    if (one.failed or other.failed) and measure.name not in _IN_SPITE_OF_FAILURES:
        return False
    difference = abs(one.median - other.median)
    if difference == 0 or difference < measure.least:
        return False
    return mann_whitney(one.values, other.values) < P_MAX


def paired(before: Results, after: Results) -> list[MovedLine]:
    """Return the lines that both runs have; those that only repeat another one are left out."""
    later = {tuple(key): new for *key, new in lines(after)}
    return [
        MovedLine(model, server, workload, measure, old, new)
        for model, server, workload, measure, old in lines(before)
        if measure not in REPEATED
        and (new := later.get((model, server, workload, measure))) is not None
    ]


def moved(before: Results, after: Results) -> list[MovedLine]:
    """Return the lines whose median of each run lies outside all rounds of the other run.

    Lines that only one of them has are left out, and differences that no measure minds.
    """
    return [
        each
        for each in paired(before, after)
        if _is_moved(each.before, each.after, MEASURES[each.measure].least)
    ]


def _is_moved(old: Line, new: Line, least: float) -> bool:
    is_apart = not old.low <= new.median <= old.high and not new.low <= old.median <= new.high
    return is_apart and abs(old.median - new.median) >= least
