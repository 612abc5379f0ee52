"""Says what a run will take before it begins: servers, models, workloads, minutes, memory, disk."""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from hearth.commands.bench.results import HEARTH, Results
from hearth.commands.bench.rounds.calibration import Rates
from hearth.commands.bench.rounds.visit_rounds import Course, VisitKey
from hearth.commands.bench.server import Server
from hearth.commands.bench.workload import Scale, Start, Workload

_GB: Final = 1e9
_ENERGY: Final = "Energy: by powermetrics, as root, if `sudo -n` starts it without a password"
_MINUTE_S: Final = 60.0
# What servers read of the ideal, on average over the workloads; a plan is told as "about".
_READ_FACTOR: Final = 1.3
_OTHERS_READ_FACTOR: Final = 2.5
_REST_S: Final = 2.0  # of each workload: until the server rests, and asking
_UNTOLD_TOKENS: Final = 1_000  # of a workload that does not say what it reads


@dataclass(frozen=True, slots=True)
class ChosenServer:
    """A server that is measured, and what stands before its first start."""

    server: Server
    version: str  # "" where it is not known before it is installed
    install_bytes: int = 0  # about; 0 = it is there

    @property
    def is_there(self) -> bool:
        return not self.install_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is going to be done. `rates` are by a model's label; without them no time is told."""

    course: Course
    servers: Sequence[ChosenServer]
    results: Results
    json_path: Path
    html_path: Path
    rates: Mapping[str, Rates] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def missing(self) -> list[VisitKey]:
        """Return the visits that are played."""
        visits = self.course.visits()
        return [visit for visit in visits if self.course.missing(visit, self.results)]

    def seconds(self) -> float | None:
        """Return about how long all of it takes; None where no rate is known."""
        if not self.rates:
            return None
        total = 0.0
        for visit in self.missing():
            if rates := self.rates.get(visit.model.facts.label):
                total += visit_seconds(self.course, visit, rates)
        return total

    def lines(self) -> list[str]:
        """Return the plan as it is shown before anything is done."""
        return [
            *_server_lines(self.servers),
            *_model_lines(self.course),
            *_workload_lines(self.course),
            *self._cost_lines(),
            *(f"Note: {warning}" for warning in self.warnings),
        ]

    def _cost_lines(self) -> list[str]:
        course, visits = self.course, self.missing()
        done = len(course.visits()) - len(visits)
        seconds = self.seconds()
        told = "not estimated" if seconds is None else f"about {minutes(seconds)}"
        return [
            f"Rounds: {course.rounds}, servers in turns; {len(visits)} visits"
            + (f" ({done} are in the file already)" if done else ""),
            f"Time: {told}",
            f"Memory: {self._memory()}",
            f"Disk: {self._disk()}",
            *([_ENERGY] if sys.platform == "darwin" else ()),
            f"Writes: {self.json_path} and {self.html_path}",
        ]

    def _memory(self) -> str:
        most = max(model.facts.bytes for model in self.course.models)
        total = psutil.virtual_memory().total
        return (
            f"one server at a time: {_gb(most)} of weights and what it keeps of prompts, "
            f"of {_gb(total)}"
        )

    def _disk(self) -> str:
        place = tempfile.gettempdir()
        most = max(
            model.kv_token_bytes * _visit_tokens(self.course.workloads, self.course.scale)
            for model in self.course.models
        )
        install = sum(each.install_bytes for each in self.servers)
        parts = [
            f"up to {_gb(most)} in {place} at a time, {_gb(shutil.disk_usage(place).free)} free"
        ]
        if install:
            parts.append(f"{_gb(install)} stay for what is installed")
        return "; ".join(parts)


def visit_seconds(course: Course, visit: VisitKey, rates: Rates) -> float:
    """Return about how long a visit takes."""
    return sum(workload_seconds(course, visit, each, rates) for each in course.played(visit))


def workload_seconds(course: Course, visit: VisitKey, workload: Workload, rates: Rates) -> float:
    """Return about how long a workload takes, with its share of the starts of its visit."""
    played, server, scale = course.played(visit), visit.server, course.scale
    starts = 0 if server.url else len({each.start for each in played})
    factor = _READ_FACTOR if server.name == HEARTH else _OTHERS_READ_FACTOR
    tokens = workload.read_tokens(scale) or _UNTOLD_TOKENS
    read_s = factor * tokens * rates.read_s + scale.answer_tokens * rates.answer_s
    return starts * rates.start_s / len(played) + read_s + _REST_S


def minutes(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 2 * _MINUTE_S:
        return f"{max(10, round(seconds, -1)):.0f} s"
    count = seconds / _MINUTE_S
    return f"{count:.0f} minutes" if count < 100 else f"{count / 60:.1f} hours"


def _visit_tokens(workloads: Sequence[Workload], scale: Scale) -> int:
    return sum(
        workload.read_tokens(scale) or _UNTOLD_TOKENS
        for workload in workloads
        if workload.start != Start.COLD
    )


def _server_lines(servers: Sequence[ChosenServer]) -> list[str]:
    lines = ["Servers:"]
    for each in servers:
        told = each.version or "version not known yet"
        if each.server.url:
            told += f", runs at {each.server.url}, is not restarted and not metered"
        elif not each.is_there:
            told += (
                f", is installed first into ~/.cache/hearth-peers, about {_gb(each.install_bytes)}"
            )
        lines.append(f"  {each.server.name:18} {told}")
    return lines


def _model_lines(course: Course) -> list[str]:
    lines = ["Models:"]
    for model in course.models:
        facts = model.facts
        bits = f", {facts.bits} bits" if facts.bits else ""
        kind = f"{facts.kind}, {facts.architecture}{bits}"
        lines.append(f"  {facts.label:28} {_gb(facts.bytes)}, {kind}")
    return lines


def _workload_lines(course: Course) -> list[str]:
    every = {each.name for visit in course.visits() for each in course.played(visit)}
    lines = [f"Workloads ({course.scale.name}):"]
    return lines + [
        f"  {each.name:18} {each.about}" for each in course.workloads if each.name in every
    ]


def _gb(nbytes: float) -> str:
    return f"{nbytes / _GB:.1f} GB" if nbytes >= _GB / 10 else f"{nbytes / 1e6:.0f} MB"
