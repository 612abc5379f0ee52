"""Plays all rounds: servers take turns on each model, and every sample is saved as it is taken.

Owner: the event loop. A visit whose samples are all in the file is not played again.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.commands.bench.checked_json import is_number
from hearth.commands.bench.results import Results, Sample
from hearth.commands.bench.rounds.error_texts import error_text
from hearth.commands.bench.rounds.machine_facts import load, now
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.started_server import (
    FOLDER_PREFIX,
    ServerStartError,
    StartedServer,
    started,
)
from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
from hearth.commands.bench.workloads.server_lives.day_of_sessions import memory_mb

ORDER: Final = (Start.FRESH, Start.RESTARTED, Start.KILLED, Start.COLD)
# Nobody restarts a server by URL, and its cache cannot be switched off.
STARTS_BY_URL: Final = (Start.FRESH, Start.RESTARTED)
_MEMORY: Final = {Start.KILLED: Memory.ONE_SESSION, Start.COLD: Memory.NONE}
WORKLOAD_S_MAX: Final = 4 * 3600.0


class SaveError(Exception):
    """What was measured cannot be kept: to go on would be for nothing."""


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
        return [
            workload
            for start in ORDER
            for workload in self.workloads
            if workload.start == start and self._is_played(workload, visit)
        ]

    def missing(self, visit: VisitKey, results: Results) -> list[Workload]:
        """Return what `results` lack of `visit`."""
        label, server = visit.model.facts.label, visit.server.name
        return [
            workload
            for workload in self.played(visit)
            if all(each.round != visit.round for each in results.of(label, server, workload.name))
        ]

    @staticmethod
    def _is_played(workload: Workload, visit: VisitKey) -> bool:
        if workload.needs_images and visit.model.facts.kind != "vision":
            return False
        if workload.start == Start.COLD and visit.round:
            return False
        return not visit.server.url or workload.start in STARTS_BY_URL


@dataclass(slots=True)
class Rounds:
    """Plays what `results` lack of `course`. `save` raises OSError where it cannot."""

    course: Course
    results: Results
    save: Callable[[], None]
    tell: Callable[[VisitKey, Workload], None]  # before each workload
    start: Callable[..., AbstractAsyncContextManager[StartedServer]] = started
    errors: int = 0

    async def play(self) -> None:
        """Play all visits that are not whole yet; each sample is saved as soon as it is taken.

        Raises:
            SaveError: it cannot be saved.
        """
        for visit in self.course.visits():
            if self.course.missing(visit, self.results):
                with tempfile.TemporaryDirectory(
                    prefix=FOLDER_PREFIX, ignore_cleanup_errors=True
                ) as directory:
                    await _Play(self, visit, Path(directory)).play()


class _Play:
    """One visit: its starts one after another, each with its workloads."""

    def __init__(self, rounds: Rounds, visit: VisitKey, directory: Path) -> None:
        self._rounds = rounds
        self._visit = visit
        self._directory = directory
        self._kept: dict[str, object] = {}
        self._has_run = False

    async def play(self) -> None:
        played = self._rounds.course.played(self._visit)
        if self._visit.server.url:
            await self._start(Start.FRESH, played, is_killed=False)
            return
        starts = [start for start in ORDER if any(each.start == start for each in played)]
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            workloads = [workload for workload in played if workload.start == start]
            if start != starts[0] and not self._has_run:  # each try may take a quarter of an hour
                self._fail(workloads, "its first start failed, and it was not started again")
                continue
            await self._start(start, workloads, is_killed=following == Start.KILLED)

    async def _start(self, start: Start, played: Sequence[Workload], *, is_killed: bool) -> None:
        """Start the server, play, and end it; by kill -9 where what follows wants a crash."""
        visit, scale = self._visit, self._rounds.course.scale
        home = self._directory / ("cold" if start == Start.COLD else "home")
        home.mkdir(exist_ok=True)
        memory = _MEMORY.get(start, Memory.DEFAULT)
        one_mb = 0
        left = list(played)
        try:
            if memory == Memory.ONE_SESSION:
                one_mb = memory_mb(visit.model.directory, scale)
            async with self._rounds.start(
                visit.server, visit.model.directory, home, memory, one_mb
            ) as running:
                self._has_run = True
                self._rounds.results.told(visit.server.name, is_metered=running.is_metered)
                while left:
                    is_over = await self._workload(left[0], running)
                    del left[0]
                    if not is_over:
                        raise ServerStartError("not asked, as it never ended what it was asked")
                if is_killed:
                    await running.kill()
        except SaveError:
            raise
        except Exception as error:  # a server may fail in any way; the others go on
            self._fail(left, self._text(error))

    def _fail(self, workloads: Sequence[Workload], why: str) -> None:
        for workload in workloads:
            self._take(workload, Measured({}, errors=(why,)), load(), now())

    async def _workload(self, workload: Workload, running: StartedServer) -> bool:
        """Play one workload; return whether it came to its end in time."""
        rounds, visit = self._rounds, self._visit
        rounds.tell(visit, workload)
        began, loaded = now(), load()
        given = Visit(
            server=visit.server,
            running=running,
            model=visit.model.facts,
            scale=rounds.course.scale,
            round=visit.round,
            kept=self._kept,
        )
        limit = asyncio.timeout(WORKLOAD_S_MAX)
        try:
            async with limit:
                measured = await workload.run(given)
        except Exception as error:  # a server may fail in any way; the others go on
            measured = Measured({}, errors=(self._text(error),))
        self._take(workload, measured, loaded, began)
        return not limit.expired()

    def _take(self, workload: Workload, measured: Measured, loaded: float, began: str) -> None:
        visit = self._visit
        values = {name: value for name, value in measured.values.items() if is_number(value)}
        odd = [f"no possible value: {name}" for name in measured.values if name not in values]
        errors = tuple(self._text(each) for each in (*measured.errors, *odd))
        self._rounds.errors += len(errors)
        self._rounds.results.add(
            [
                Sample(
                    model=visit.model.facts.label,
                    server=visit.server.name,
                    workload=workload.name,
                    round=visit.round,
                    values=values,
                    digests=measured.digests,
                    errors=errors,
                    load=loaded,
                    began=began,
                )
            ]
        )
        try:
            self._rounds.save()
        except OSError as error:
            raise SaveError(f"The sample cannot be saved: {error}") from error

    def _text(self, error: Exception | str) -> str:
        return error_text(error, {self._visit.model.directory: "{model}", self._directory: "{dir}"})
