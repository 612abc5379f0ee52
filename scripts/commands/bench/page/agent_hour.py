"""Adds up what an agent's hour costs on a server, from an explicit mix of counted workloads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from hearth.commands.bench.measures import Measure, Unit
from hearth.commands.bench.page.page_lines import PageLines
from hearth.commands.bench.results import HEARTH, Sample
from hearth.commands.bench.statistics import Line, line_of


@dataclass(frozen=True, slots=True)
class HourPart:
    """What an hour has of one workload: `times` the whole of it, or that many of its requests."""

    workload: str
    times: int
    what: str  # they are
    is_by_request: bool = False

    def share(self, sample: Sample) -> float:
        """Return what a sample's values are multiplied by."""
        if not self.is_by_request:
            return self.times
        return self.times / max(1.0, sample.values.get("requests", 1.0))


# An hour of one agent at work: an assumption. Nobody counted how often people cancel, or restart a
# server; so the page tells what each part adds, and what is left without the cancelled prompts.
HOUR: Final = (
    HourPart("linear", 40, "turns of a session", is_by_request=True),
    HourPart("sub-agents", 2, "fan-outs to sub-agents"),
    HourPart("forks-and-edits", 4, "edits or forks", is_by_request=True),
    HourPart("cancel-0s", 2, "prompts cancelled and sent again at once", is_by_request=True),
    HourPart("cancel-3s", 1, "sent again after 3 s", is_by_request=True),
    HourPart("restart", 1, "restart of the server", is_by_request=True),
)
CANCELLED: Final = "cancel"  # begins the names of workloads whose prompts are cancelled
READ: Final = Measure("hour_read", "tokens read", Unit.TOKENS, False, 64)
WAIT: Final = Measure("hour_wait", "to first tokens", Unit.SECONDS, False, 0.5)
CPU: Final = Measure("hour_cpu", "CPU", Unit.SECONDS, False, 0.5)
COSTS: Final = (READ, WAIT, CPU)


@dataclass(frozen=True, slots=True)
class HourCost:
    """What an hour costs on one server. `missing` are workloads that it did not answer."""

    server: str
    lines: Mapping[str, Line]  # by name of COSTS
    missing: tuple[str, ...] = ()
    failed: int = 0  # requests, of all rounds: what failed was not read
    read: Mapping[str, float] = field(default_factory=dict)  # tokens that each workload adds

    @property
    def read_uncancelled(self) -> float | None:
        """Return the tokens of all but the cancelled prompts; None where some are not known."""
        if not self.read or self.missing:
            return None
        return sum(read for name, read in self.read.items() if not name.startswith(CANCELLED))


@dataclass(frozen=True, slots=True)
class AgentHour:
    """What the hour costs on all servers with one model."""

    model: str
    parts: tuple[HourPart, ...]
    costs: tuple[HourCost, ...]  # Hearth's first
    ideal: float | None  # tokens


def hour_parts(lines: PageLines) -> tuple[HourPart, ...]:
    """Return what of the hour this run has measured: a part that nobody played is left out."""
    return tuple(part for part in HOUR if part.workload in lines.workloads)


def agent_hour(lines: PageLines, model: str) -> AgentHour:
    """Return the hour with one model. A round counts if all parts were measured in it."""
    parts = hour_parts(lines)
    costs = tuple(_cost(lines, model, server, parts) for server in lines.servers)
    measured = tuple(cost for cost in costs if cost.lines or cost.missing)
    return AgentHour(model, parts, measured, _ideal(lines, model, parts))


def values_of(sample: Sample) -> dict[str, float]:
    """Return what one sample adds to the hour.

    No workload tells the sum of its waits; it is taken to be their number times the median.
    """
    told, found = sample.values, dict[str, float]()
    read = told.get("read_tokens", told.get("claimed_tokens"))
    if read is not None:
        found[READ.name] = read
    if "ttft_p50_s" in told:
        found[WAIT.name] = told["ttft_p50_s"] * told.get("requests", 1.0)
    if "cpu_s" in told:
        found[CPU.name] = told["cpu_s"]
    return found


def _cost(lines: PageLines, model: str, server: str, parts: tuple[HourPart, ...]) -> HourCost:
    samples = {
        part: {each.round: each for each in lines.samples(model, server, part.workload)}
        for part in parts
    }
    if not any(samples.values()):
        return HourCost(server, {})
    missing = tuple(
        part.workload
        for part, found in samples.items()
        if not any(each.values for each in found.values())  # it did not start, or broke down
    )
    failed = sum(
        int(each.values.get("failed", 0)) for found in samples.values() for each in found.values()
    )
    facts = lines.results.servers.get(server)
    is_claimed = facts is not None and not facts.is_metered
    rounds = set.intersection(*(set(found) for found in samples.values()))
    sums = [_sums({part: found[at] for part, found in samples.items()}) for at in sorted(rounds)]
    costs = {}
    for cost in COSTS:
        values = [each[cost.name] for each in sums if cost.name in each]
        if line := line_of(values, is_claimed and cost is READ, failed):
            costs[cost.name] = line
    return HourCost(server, costs, missing, failed, _read_by_part(samples))


def _read_by_part(samples: Mapping[HourPart, Mapping[int, Sample]]) -> dict[str, float]:
    """Return what each workload adds to the tokens of the hour, its median over the rounds."""
    told = {
        part.workload: [
            part.share(each) * values[READ.name]
            for each in found.values()
            if READ.name in (values := values_of(each))
        ]
        for part, found in samples.items()
    }
    return {name: median(values) for name, values in told.items() if values}


def _sums(samples: Mapping[HourPart, Sample]) -> dict[str, float]:
    """Return each cost of one round, of those that all parts tell."""
    told = [(part.share(sample), values_of(sample)) for part, sample in samples.items()]
    names = set.intersection(*(set(values) for _, values in told))
    return {name: sum(share * values[name] for share, values in told) for name in names}


def _ideal(lines: PageLines, model: str, parts: tuple[HourPart, ...]) -> float | None:
    """Return what a cache that forgets nothing would read in the hour; Hearth alone tells it."""
    total = 0.0
    for part in parts:
        found = [
            part.share(each) * each.values["ideal_tokens"]
            for each in lines.samples(model, HEARTH, part.workload)
            if "ideal_tokens" in each.values
        ]
        if not found:
            return None
        total += median(found)
    return total if parts else None
