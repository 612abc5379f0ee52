"""Tells on stderr how far a run is, and about how long the rest takes."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from hearth.commands.bench.results import Results
from hearth.commands.bench.rounds.calibration import Rates
from hearth.commands.bench.rounds.plan import minutes, workload_seconds
from hearth.commands.bench.rounds.visit_rounds import Course, VisitKey
from hearth.commands.bench.workload import Workload

_SHARE_MIN: Final = 0.05  # before that what was estimated tells more than what was measured


class Progress:
    """Counts what is played. Its estimate is corrected by how long the part that is done took."""

    def __init__(
        self,
        course: Course,
        results: Results,
        rates: Mapping[str, Rates],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._course = course
        self._rates = rates
        self._say = say
        self._clock = clock
        self._began = clock()
        visits = [visit for visit in course.visits() if course.missing(visit, results)]
        self._total = sum(len(course.played(visit)) for visit in visits)
        self._planned_s = sum(
            self._cost(visit, workload) for visit in visits for workload in course.played(visit)
        )
        self._begun = 0
        self._done_s = 0.0
        self._last_s = 0.0

    def tell(self, visit: VisitKey, workload: Workload) -> None:
        """Say what begins now."""
        self._done_s += self._last_s
        self._last_s = self._cost(visit, workload)
        self._begun += 1
        self._say(
            f"[{self._begun}/{self._total}] {visit.model.facts.label}, round {visit.round + 1} of "
            f"{self._course.rounds}, {visit.server.name}: {workload.name}{self._left()}"
        )

    def _left(self) -> str:
        share = self._done_s / self._planned_s
        if share >= _SHARE_MIN:
            left_s = (self._clock() - self._began) * (1 - share) / share
        elif self._rates:
            left_s = self._planned_s - self._done_s
        else:
            return ""
        return f" (about {minutes(left_s)} left)"

    def _cost(self, visit: VisitKey, workload: Workload) -> float:
        rates = self._rates.get(visit.model.facts.label, Rates(0.0, 1e-3, 1e-2))
        return workload_seconds(self._course, visit, workload, rates)
