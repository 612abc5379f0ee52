"""Plays all rounds: servers take turns on each model, and what is measured is saved at once.

Owner: the event loop. A visit of which the file has everything is not played again.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hearth.commands.bench.results import Results
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.server_environment import without_paths
from hearth.commands.bench.servers.started_server import ServerStartError, StartedServer, started
from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
from hearth.commands.bench.workloads.server_lives.day_of_sessions import memory_mb

ORDER: Final = (Start.FRESH, Start.RESTARTED, Start.KILLED, Start.COLD)
# Nobody restarts a server by URL, and its cache cannot be switched off.
STARTS_BY_URL: Final = (Start.FRESH, Start.RESTARTED)
WORKLOAD_S_MAX: Final = 4 * 3600.0
MEMORY: Final = {Start.KILLED: Memory.ONE_SESSION, Start.COLD: Memory.NONE}
ERROR_CHARS_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class VisitKey:
    """One visit: a server in one round on one model."""

    model: BenchModel
    round: int
    server: Server


@dataclass(frozen=True, slots=True)
class Course:
    """What is played: on which models and servers, how large, and how often."""

    models: Sequence[BenchModel]
    servers: Sequence[Server]
    workloads: Sequence[Workload]
    scale: Scale
    rounds: int

    def visits(self) -> list[VisitKey]:
        """Return all visits in order.

        Who begins a round changes, and every other round goes backwards: no server is always first,
        or always behind the same one, which may have left the machine hot.
        """
        found = []
        for model in self.models:
            for number in range(self.rounds):
                turn = number % len(self.servers)
                first, *rest = [*self.servers[turn:], *self.servers[:turn]]
                rest = rest[::-1] if number % 2 else rest
                found += [VisitKey(model, number, server) for server in (first, *rest)]
        return found

    def played(self, visit: VisitKey) -> list[Workload]:
        """Return what is played in `visit`, in the order of its starts."""
        starts = STARTS_BY_URL if visit.server.url else ORDER
        return [
            workload
            for start in starts
            for workload in self.workloads
            if workload.start == start
            and not (workload.needs_images and visit.model.facts.kind != "vision")
            and not (start == Start.COLD and visit.round)
        ]

    def missing(self, results: Results) -> list[VisitKey]:
        """Return the visits of which `results` lack something."""
        return [
            visit
            for visit in self.visits()
            if any(
                visit.round not in results.cell(*_place(visit, workload)).rounds
                for workload in self.played(visit)
            )
        ]


async def play(course: Course, results: Results, path: Path) -> None:
    """Play all visits that are not whole yet, and write `results` to `path` after each workload.

    Raises:
        OSError: they cannot be written.
    """
    for visit in course.missing(results):
        with tempfile.TemporaryDirectory(
            prefix="hearth-bench-", ignore_cleanup_errors=True
        ) as directory:
            await _play_visit(course, visit, results, path, Path(directory))


async def _play_visit(
    course: Course, visit: VisitKey, results: Results, path: Path, directory: Path
) -> None:
    """Play one visit: its starts one after another, each with its workloads."""
    is_url, has_run = bool(visit.server.url), False
    kept, left = dict[str, object](), course.played(visit)
    # By URL there is one start, in which all is played.
    starts = list(dict.fromkeys(Start.FRESH if is_url else each.start for each in left))

    def take(workload: Workload, measured: Measured) -> None:
        errors = [
            without_paths(each, visit.model.directory, directory)[-ERROR_CHARS_MAX:]
            for each in measured.errors
        ]
        values = {**measured.values, "load": os.getloadavg()[0]}
        results.put(_place(visit, workload), visit.round, values, measured.digests, errors)
        results.save(path)

    for start, following in zip(starts, [*starts[1:], None], strict=True):
        try:
            async with _started(course, visit, start, directory) as running:
                has_run = True
                served = results.servers[visit.server.name]
                results.servers[served.name] = replace(served, is_metered=running.is_metered)
                facts = visit.model.facts
                given = Visit(visit.server, running, facts, course.scale, visit.round, kept)
                while left and (left[0].start == start or is_url):
                    told = (*_place(visit, left[0]), f"round {visit.round + 1} of {course.rounds}")
                    print(", ".join(told), file=sys.stderr, flush=True)
                    take(left[0], await _played(left[0], given))
                    del left[0]
                if following == Start.KILLED:
                    await running.kill()
        except ServerStartError as error:
            # One that never ran is not started again: each try may take a quarter of an hour.
            lost = [each for each in left if each.start == start or is_url or not has_run]
            for workload in lost:
                take(workload, Measured({}, errors=(str(error),)))
            del left[: len(lost)]
            if not left:
                return


def _started(
    course: Course, visit: VisitKey, start: Start, directory: Path
) -> AbstractAsyncContextManager[StartedServer]:
    home = directory / ("cold" if start == Start.COLD else "home")
    home.mkdir(exist_ok=True)
    memory, model = MEMORY.get(start, Memory.DEFAULT), visit.model.directory
    try:
        one_mb = memory_mb(model, course.scale) if memory == Memory.ONE_SESSION else 0
    except Exception as error:  # whatever an architecture raises that Hearth does not know
        raise ServerStartError(f"the memory of one session is not known: {error}") from error
    return started(visit.server, model, home, memory, one_mb)


async def _played(workload: Workload, given: Visit) -> Measured:
    """Play one workload.

    Raises:
        ServerStartError: it did not end in time; the server is not asked before its next start.
    """
    try:
        async with asyncio.timeout(WORKLOAD_S_MAX):
            return await workload.run(given)
    except TimeoutError as error:
        raise ServerStartError(f"{workload.name} did not end in time") from error
    except Exception as error:  # a server may fail in any way; the others go on
        return Measured({}, errors=(f"{type(error).__name__}: {error}",))


def _place(visit: VisitKey, workload: Workload) -> tuple[str, str, str]:
    return visit.model.facts.label, visit.server.name, workload.name
