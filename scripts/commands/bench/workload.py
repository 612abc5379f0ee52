"""Says what a workload of `hearth bench` is, and what it is given."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Running, Server


class Start(StrEnum):
    """How a server was started before a workload. A visit has them in this order."""

    FRESH = "fresh"  # in an empty home
    RESTARTED = "restarted"  # after a clean stop of the fresh one
    KILLED = "killed"  # after kill -9 of the restarted one; with memory for one session from here
    COLD = "cold"  # in an empty home, its cache switched off; in the first round alone


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the workloads are."""

    name: str
    text_chars_max: int  # of each text in a captured session; 0 = whole
    requests_max: int  # of each captured session; 0 = all
    trunk_tokens: int  # that eight agents share
    long_tokens: int  # read beside three streams
    day_tokens: int  # of each of ten sessions
    answer_tokens: int  # of timed answers
    rounds: int  # unless the caller says otherwise


SCALES: Final = {
    scale.name: scale
    for scale in (
        Scale("quick", 300, 6, 1_000, 4_000, 600, 32, 4),
        Scale("full", 600, 10, 2_000, 16_000, 1_000, 64, 5),
        Scale("whole", 0, 0, 8_000, 16_000, 4_000, 256, 5),
    )
}


@dataclass(slots=True)
class Visit:
    """One started server, for the workloads of one start. Owner: the event loop.

    `kept` outlives the start: a workload leaves there what a later one of the same visit needs
    (the session that a restart is asked about).
    """

    server: Server
    running: Running
    model: ModelFacts
    scale: Scale
    round: int
    kept: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a workload found: values by name of MEASURES, digests of answers, what failed."""

    values: Mapping[str, float]
    digests: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """One thing that agents do. Its prompts are the same in each round and on each server."""

    name: str
    about: str  # one sentence, for plan and page
    start: Start
    run: Callable[[Visit], Awaitable[Measured]]
    is_quick: bool = True  # `--quick` plays it too
    needs_images: bool = False
