"""Holds what `hearth bench` measured, and reads and writes its one JSON file.

The file has no prompts and no answers, but digests of answers. Errors are a server's own words.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 2
ROUNDS_MAX: Final = 10  # an exact test over more takes long, and tells no more
STAND_IN_BYTES_MAX: Final = 200e6  # no model that people work with is smaller
HEARTH: Final = "hearth"  # the server that the others are compared with


@dataclass(slots=True)
class Cell:
    """What one server measured on one workload of one model. `digests` and `errors` by round."""

    rounds: list[int] = field(default_factory=list)  # from 0, as they were played
    values: dict[str, list[float | None]] = field(default_factory=dict)  # by measure, one a round
    digests: dict[str, list[str]] = field(default_factory=dict)  # of the answers, where compared
    errors: dict[str, list[str]] = field(default_factory=dict)

    def numbers(self, measure: str) -> list[float]:
        """Return the values of the rounds that have one."""
        return [each for each in self.values.get(measure, ()) if each is not None]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a reader must know of a server that was measured."""

    name: str
    version: str
    command: str  # with {model}, {port}, {dir}
    is_metered: bool  # its tokens are counted in attention; else they are what it says
    notes: Sequence[str] = ()  # what it needed, what it does not start with


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that was measured. `label` is its directory's name, never its path."""

    label: str
    kind: str  # text or vision
    architecture: str  # model_type of its config
    bytes: int  # of its weights
    bits: int = 0  # of quantised weights; 0 = they are not

    @property
    def is_stand_in(self) -> bool:
        """Return whether it is too small to be one that people work with: a test fixture."""
        return 0 < self.bytes < STAND_IN_BYTES_MAX


@dataclass(slots=True)
class Results:
    """All of one run. Owner: the command; `put` and `save` after each workload make it resumable.

    Cells are by model, server and workload.
    """

    command: str  # that makes it, to be typed again
    machine: str  # chip, memory, system: no host name
    version: str  # of Hearth
    commit: str
    scale: str  # of SCALES
    rounds: int
    began: str  # UTC
    models: dict[str, ModelFacts] = field(default_factory=dict)
    servers: dict[str, ServerFacts] = field(default_factory=dict)
    cells: dict[str, dict[str, dict[str, Cell]]] = field(default_factory=dict)

    def put(
        self,
        place: tuple[str, str, str],
        number: int,
        values: Mapping[str, float],
        digests: Sequence[str] = (),
        errors: Sequence[str] = (),
    ) -> None:
        """Take what round `number` measured at `place`, in place of what it had before."""
        model, server, workload = place
        of_server = self.cells.setdefault(model, {}).setdefault(server, {})
        cell = of_server.setdefault(workload, Cell())
        if number not in cell.rounds:
            cell.rounds.append(number)
            for column in cell.values.values():
                column.append(None)
        for name in {*cell.values, *values}:
            column = cell.values.setdefault(name, [None] * len(cell.rounds))
            column[cell.rounds.index(number)] = values.get(name)
        for kept, told in ((cell.digests, digests), (cell.errors, errors)):
            kept.pop(str(number), None)
            kept |= {str(number): list(told)} if told else {}

    def cell(self, model: str, server: str, workload: str) -> Cell:
        """Return a cell, an empty one where nothing was measured."""
        return self.cells.get(model, {}).get(server, {}).get(workload, Cell())

    def places(self) -> Iterator[tuple[str, str, str]]:
        """Yield model, server and workload of each cell."""
        for model, servers in self.cells.items():
            for server, workloads in servers.items():
                yield from ((model, server, workload) for workload in workloads)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        part = path.with_name(path.name + ".part")
        told = asdict(self, dict_factory=lambda row: {key: each for key, each in row if each != {}})
        part.write_text(json.dumps({"format": FORMAT, **told}, separators=(",", ":")))
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what `save` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is of another format, or no such file.
        """
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if (found := told.pop("format")) != FORMAT:
                raise ValueError(f"it has format {found}, this version reads {FORMAT}")
            models, servers = told.get("models", {}), told.get("servers", {})
            told["models"] = {name: ModelFacts(**row) for name, row in models.items()}
            told["servers"] = {name: ServerFacts(**row) for name, row in servers.items()}
            told["cells"] = {
                model: {
                    server: {workload: Cell(**row) for workload, row in workloads.items()}
                    for server, workloads in servers.items()
                }
                for model, servers in told.get("cells", {}).items()
            }
            return cls(**told)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of `hearth bench`: {error!r}") from None
