"""Looks up lines of a run for the page, each once, and says on which of them Hearth is behind."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from hearth.commands.bench import statistics
from hearth.commands.bench.measures import MEASURES, Measure
from hearth.commands.bench.rank_test import chance_told_apart
from hearth.commands.bench.results import HEARTH, Results, Sample
from hearth.commands.bench.statistics import COLD_SUFFIX, REPEATED, Line

ROUNDS_MIN: Final = 4  # of each server: with fewer, no order of values is rarer than 1 in 20


class Standing(Enum):
    """How another server stands to Hearth on one line."""

    BETTER = "better"
    SAME = "can't be told apart"
    WORSE = "worse"
    FAILED = "not compared: requests failed, or other work was done"


@dataclass(frozen=True, slots=True)
class LineBehind:
    """A line on which Hearth is behind, with all servers that are ahead of it, the best first."""

    model: str
    workload: str
    measure: Measure
    hearth: Line
    ahead: tuple[tuple[str, Line], ...]

    @property
    def factor(self) -> float:
        """Return how many times as good the best one is; large where a value is 0."""
        own, best = self.hearth.median, self.ahead[0][1].median
        large, small = (best, own) if self.measure.is_more_better else (own, best)
        return large / small if small > 0 else 1e9


def standing(own: Line, other: Line, measure: Measure) -> Standing:
    """Return how the server of the line `other` stands to Hearth."""
    if not statistics.told_apart(own, other, measure):
        is_no_pair = own.failed or other.failed or own.is_unlike or other.is_unlike
        return Standing.FAILED if is_no_pair else Standing.SAME
    is_better = (other.median > own.median) == bool(measure.is_more_better)
    return Standing.BETTER if is_better else Standing.WORSE


class PageLines:
    """All lines of a run. Hearth stands first among servers, the rest as they were measured."""

    def __init__(self, results: Results) -> None:
        self.results = results
        samples = results.samples
        self.models = _in_order(results.models, (each.model for each in samples))
        servers = _in_order(results.servers, (each.server for each in samples))
        self.servers = sorted(servers, key=lambda name: name != HEARTH)
        self.rounds = len({each.round for each in samples})  # fewer where the run was interrupted
        self.workloads = _in_order((), (each.workload for each in samples))
        # A line is looked for in its own samples alone, not in all of the run.
        apart: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        for each in samples:
            # Answers without a cache are what those of the same workload are compared with.
            apart[each.model, each.workload.removesuffix(COLD_SUFFIX)].append(each)
        self._parts = {key: replace(results, samples=found) for key, found in apart.items()}
        self._lines: dict[tuple[str, str, str, str], Line | None] = {}
        self._standings: dict[tuple[str, str, str, str], Standing] = {}
        self.behind = list(self._behind())

    @property
    def can_compare(self) -> bool:
        """Return whether there are rounds enough to tell a difference from chance."""
        return self.rounds >= ROUNDS_MIN

    def line(self, model: str, server: str, workload: str, measure: str) -> Line | None:
        """Return the line, None where nothing was measured."""
        key = (model, server, workload, measure)
        if key not in self._lines:
            part = self._part(model, workload)
            self._lines[key] = statistics.line(part, *key) if part else None
        return self._lines[key]

    def samples(self, model: str, server: str, workload: str) -> list[Sample]:
        """Return the samples of all rounds, in their order."""
        part = self._part(model, workload)
        return part.of(model, server, workload) if part else []

    def _part(self, model: str, workload: str) -> Results | None:
        return self._parts.get((model, workload.removesuffix(COLD_SUFFIX)))

    def of(self, model: str, workload: str, measure: str) -> dict[str, Line]:
        """Return the lines of all servers that were measured, Hearth's first."""
        lines = ((name, self.line(model, name, workload, measure)) for name in self.servers)
        return {name: line for name, line in lines if line is not None}

    def measures(self, workload: str) -> list[Measure]:
        """Return what was measured of a workload, in the order of MEASURES."""
        return [
            each
            for each in MEASURES.values()
            if any(self.of(model, workload, each.name) for model in self.models)
        ]

    def standing(self, model: str, server: str, workload: str, measure: Measure) -> Standing | None:
        """Return how a server stands to Hearth; None where that was not compared."""
        lines = self.of(model, workload, measure.name)
        if measure.is_more_better is None or server == HEARTH or not {HEARTH, server} <= set(lines):
            return None
        key = (model, server, workload, measure.name)
        if key not in self._standings:
            self._standings[key] = standing(lines[HEARTH], lines[server], measure)
        return self._standings[key]

    def standings(self) -> Iterator[Standing]:
        """Yield the standing of each other server on each line that was compared."""
        for model, workload, measure in self._compared():
            for server in self.servers:
                if found := self.standing(model, server, workload, measure):
                    yield found

    def by_chance(self) -> float:
        """Return how many of `standings` would differ, at most, if all servers were alike."""
        found = 0.0
        for model, workload, measure in self._compared():
            lines = self.of(model, workload, measure.name)
            for server in self.servers:
                told = self.standing(model, server, workload, measure)
                if told not in (None, Standing.FAILED):
                    own, other = lines[HEARTH].values, lines[server].values
                    found += chance_told_apart(len(own), len(other))
        return found

    def behind_by_measure(self, workloads: Collection[str]) -> list[list[LineBehind]]:
        """Return the lines behind of some workloads, those of one measure together.

        Measures are in the order of MEASURES; of each the widest difference stands first.
        """
        found = [each for each in self.behind if each.workload in workloads]
        groups = ([each for each in found if each.measure is one] for one in MEASURES.values())
        return [sorted(group, key=lambda each: -each.factor) for group in groups if group]

    def _behind(self) -> Iterator[LineBehind]:
        for model, workload, measure in self._compared():
            lines = self.of(model, workload, measure.name)
            ahead = [
                (server, line)
                for server, line in lines.items()
                if self.standing(model, server, workload, measure) is Standing.BETTER
            ]
            ahead.sort(key=lambda pair: pair[1].median, reverse=bool(measure.is_more_better))
            if ahead:
                yield LineBehind(model, workload, measure, lines[HEARTH], tuple(ahead))

    def _compared(self) -> Iterator[tuple[str, str, Measure]]:
        for workload in self.workloads:
            for measure in self.measures(workload):
                if measure.is_more_better is not None and measure.name not in REPEATED:
                    for model in self.models:
                        if not self._is_repeated(model, workload, measure):
                            yield model, workload, measure

    def _is_repeated(self, model: str, workload: str, measure: Measure) -> bool:
        """Return whether a p95 is of so few requests that it is the p50."""
        if not measure.name.endswith("_p95_s"):
            return False
        middle = measure.name.replace("_p95_s", "_p50_s")
        return self.of(model, workload, measure.name) == self.of(model, workload, middle)


def _in_order(known: object, met: Iterator[str]) -> list[str]:
    """Return names once each: those known first, then in the order that they are met."""
    assert isinstance(known, dict | tuple)
    found = list(dict.fromkeys(met))
    return [name for name in known if name in found] + [name for name in found if name not in known]
