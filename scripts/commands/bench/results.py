"""Holds what `hearth bench` measured, and reads and writes its one JSON file.

The file can be shared: it has no prompts, no answers (digests of them), no paths and no names of
people or machines.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hearth.commands.bench.measures import MEASURES

FORMAT: Final = 1
HEARTH: Final = "hearth"  # the server that the others are compared with


@dataclass(frozen=True, slots=True)
class Sample:
    """What one visit of a server measured on one workload. Values are by name of MEASURES."""

    model: str
    server: str
    workload: str
    round: int  # from 0
    values: Mapping[str, float]
    digests: tuple[str, ...] = ()  # of the answers, where they are compared
    errors: tuple[str, ...] = ()  # what failed, without any prompt
    load: float = 0.0  # of the machine, one minute, when it began
    began: str = ""  # UTC

    def __post_init__(self) -> None:
        assert set(self.values) <= set(MEASURES), set(self.values) - set(MEASURES)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a reader must know of a server that was measured."""

    name: str
    version: str
    command: str  # with {model}, {port}, {dir}
    is_metered: bool  # its tokens are counted in attention; else they are what it says
    notes: tuple[str, ...] = ()  # what it needed, what it does not start with


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that was measured. `label` is its directory's name, never its path."""

    label: str
    kind: str  # dense, hybrid, window or vision
    architecture: str  # model_type of its config
    bytes: int  # of its weights
    bits: int = 0  # of quantised weights; 0 = they are not


@dataclass(slots=True)
class Results:
    """All of one run. Owner: the command; `add` and `save` after each sample make it resumable."""

    command: str  # that makes it, to be typed again
    machine: str  # chip, memory, system: no host name
    version: str  # of Hearth
    commit: str
    scale: str  # of SCALES
    rounds: int
    began: str  # UTC
    models: dict[str, ModelFacts] = field(default_factory=dict)
    servers: dict[str, ServerFacts] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def add(self, samples: Iterable[Sample]) -> None:
        """Take samples in place of earlier ones of the same model, server, workload and round."""
        made = {self._key(sample): sample for sample in samples}
        self.samples = [each for each in self.samples if self._key(each) not in made]
        self.samples += made.values()

    def told(self, server: str, *, is_metered: bool) -> None:
        """Note what a start of `server` has told."""
        self.servers[server] = replace(self.servers[server], is_metered=is_metered)

    def of(self, model: str, server: str, workload: str) -> list[Sample]:
        """Return the samples of all rounds, in their order."""
        wanted = (model, server, workload)
        found = [each for each in self.samples if self._key(each)[:3] == wanted]
        return sorted(found, key=lambda each: each.round)

    @staticmethod
    def _key(sample: Sample) -> tuple[str, str, str, int]:
        return sample.model, sample.server, sample.workload, sample.round

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what `save` wrote.

        Raises:
            ValueError: it is of another format.
        """
        told: dict[str, Any] = json.loads(path.read_text())
        if (found := told.pop("format", None)) != FORMAT:
            raise ValueError(f"{path} has format {found}, this version reads {FORMAT}")
        told["models"] = {name: ModelFacts(**each) for name, each in told["models"].items()}
        told["servers"] = {
            name: ServerFacts(**{**each, "notes": tuple(each["notes"])})
            for name, each in told["servers"].items()
        }
        told["samples"] = [
            Sample(**{**each, "digests": tuple(each["digests"]), "errors": tuple(each["errors"])})
            for each in told["samples"]
        ]
        return cls(**told)
