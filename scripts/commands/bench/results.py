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

from hearth.commands.bench.checked_json import checked_object, made, read_object, read_text
from hearth.commands.bench.measures import MEASURES

FORMAT: Final = 1
FILE_BYTES_MAX: Final = 64 << 20  # a night's run has some 2 MB
ROUNDS_MAX: Final = 30  # an exact test over more takes long, and tells no more
SAMPLES_MAX: Final = 100_000
NAMES_MAX: Final = 100  # of models, of servers, of workloads: a page has a line for each of each
STAND_IN_BYTES_MAX: Final = 200e6  # no model that people work with is smaller
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
    digest: str = ""  # by which a later run knows other files of that name; no file follows from it

    @property
    def is_stand_in(self) -> bool:
        """Return whether it is too small to be one that people work with: a test fixture."""
        return 0 < self.bytes < STAND_IN_BYTES_MAX


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
        made = {self.key_of(sample): sample for sample in samples}
        self.samples = [each for each in self.samples if self.key_of(each) not in made]
        self.samples += made.values()

    def told(self, server: str, *, is_metered: bool) -> None:
        """Note what a start of `server` has told."""
        self.servers[server] = replace(self.servers[server], is_metered=is_metered)

    def of(self, model: str, server: str, workload: str) -> list[Sample]:
        """Return the samples of all rounds, in their order."""
        wanted = (model, server, workload)
        found = [each for each in self.samples if self.key_of(each)[:3] == wanted]
        return sorted(found, key=lambda each: each.round)

    @staticmethod
    def key_of(sample: Sample) -> tuple[str, str, str, int]:
        return sample.model, sample.server, sample.workload, sample.round

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
            os.replace(part, path)
        except OSError:  # the disk is full
            part.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what `save` wrote, or what a stranger has sent.

        Raises:
            OSError: it cannot be read.
            ValueError: it is of another format, or no such file.
        """
        try:
            return _read(read_object(path, FILE_BYTES_MAX))
        except ValueError as error:
            raise ValueError(f"{path} is no file of `hearth bench`: {error}") from None


def _read(told: dict[str, Any]) -> Results:
    if (found := told.pop("format", None)) != FORMAT:
        raise ValueError(f"it has format {ascii(found)[:20]}, this version reads {FORMAT}")
    samples, parts = told.pop("samples", None), dict[str, Any]()
    if not isinstance(samples, list) or len(samples) > SAMPLES_MAX:
        raise ValueError(f"it has no list of {SAMPLES_MAX:,} samples at most")
    for name, kind in (("models", ModelFacts), ("servers", ServerFacts)):
        rows = checked_object(told.pop(name, None), name)
        parts[name] = {read_text(key, name): made(kind, row, name) for key, row in rows.items()}
    parts["samples"] = [_read_sample(each) for each in samples]
    for name, count in (("model", len(parts["models"])), ("server", len(parts["servers"]))):
        count = max(count, len({getattr(each, name) for each in parts["samples"]}))
        if count > NAMES_MAX:
            raise ValueError(f"it has {count} {name}s, more than {NAMES_MAX}")
    if len({each.workload for each in parts["samples"]}) > NAMES_MAX:
        raise ValueError(f"it has more than {NAMES_MAX} workloads")
    results = replace(made(Results, told, "it"), **parts)
    if len({Results.key_of(each) for each in results.samples}) < len(results.samples):
        raise ValueError("it has two samples of one round")
    if any(each.round >= ROUNDS_MAX for each in results.samples):
        raise ValueError(f"it has more than {ROUNDS_MAX} rounds")
    return results


def _read_sample(told: object) -> Sample:
    row = checked_object(told, "a sample")
    values = row.get("values")
    if isinstance(values, dict) and (odd := sorted(values.keys() - MEASURES.keys())):
        raise ValueError(f"a sample has a value {ascii(odd[0])[:40]}, which nobody knows")
    return made(Sample, row, "a sample")
