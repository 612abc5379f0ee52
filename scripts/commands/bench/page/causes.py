"""Reads why Hearth is behind on a line: text that people write beside the figures.

A file has a section a line, `## workload / measure` (the measure's name or label; `*` for any
workload), and paragraphs below it. Words between backquotes are code.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hearth.commands.bench.measures import MEASURES, Measure

HEADING_CHARS_MAX: Final = 300
ANY: Final = "*"
SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


@dataclass(frozen=True, slots=True)
class Causes:
    """Causes by workload and name of a measure, a paragraph each."""

    by_line: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parsed(cls, text: str) -> "Causes":
        """Read a file's text.

        Raises:
            ValueError: a section names no measure.
        """
        found: dict[tuple[str, str], list[list[str]]] = {}
        below: list[list[str]] | None = None
        for line in text.splitlines():
            if line.startswith("## "):
                below = found.setdefault(_key(line), [])
            elif line.startswith("# "):
                below = None
            elif below is not None:
                _add(below, line.strip())
        return cls(
            {
                key: tuple(" ".join(words) for words in paragraphs if words)
                for key, paragraphs in found.items()
            }
        )

    def of(self, workload: str, measure: Measure) -> tuple[str, ...]:
        """Return the cause's paragraphs; that of any workload where there is none of its own."""
        own = self.by_line.get((workload, measure.name))
        return own or self.by_line.get((ANY, measure.name), ())

    def first_line(self, workload: str, measure: Measure) -> str:
        """Return the first sentence of a cause; empty without one."""
        paragraphs = self.of(workload, measure)
        return SENTENCE.split(paragraphs[0], maxsplit=1)[0] if paragraphs else ""

    def unused(self, lines: Iterable[tuple[str, str]]) -> list[str]:
        """Return the sections that none of the lines (workload, measure) on the page needs."""
        met = set(lines)
        measures = {measure for _, measure in met}
        return [
            f"{workload} / {measure}"
            for workload, measure in self.by_line
            if (measure not in measures if workload == ANY else (workload, measure) not in met)
        ]


def _add(paragraphs: list[list[str]], line: str) -> None:
    """Add a line to the last paragraph; an empty one ends it."""
    if not line:
        paragraphs.append([])
    elif paragraphs:
        paragraphs[-1].append(line)
    else:
        paragraphs.append([line])


def _key(heading: str) -> tuple[str, str]:
    heading = " ".join(heading.split())[:HEADING_CHARS_MAX]
    workload, slash, name = (
        part.strip("` ") for part in heading.removeprefix("##").partition(" / ")
    )
    if not (workload and slash and name):
        raise ValueError(f"{heading!r} is not `## workload / measure`")
    for measure in MEASURES.values():
        if name in (measure.name, measure.label):
            return workload, measure.name
    raise ValueError(f"{heading!r} names no measure; there are: {', '.join(MEASURES)}")
