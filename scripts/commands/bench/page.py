"""Writes the one HTML page of a run: nothing in it is fetched, and it needs no script."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from hearth.commands.bench.measures import MEASURES, Unit
from hearth.commands.bench.results import HEARTH, Results
from hearth.commands.bench.statistics import (
    ROUNDS_MIN,
    Comparison,
    Line,
    Standing,
    comparisons,
    lines,
    read_over,
)

TEMPLATE: Final = Path(__file__).with_name("page.html")
IDEAL_TOKENS_MIN: Final = 64  # of a workload whose ideal is smaller, a few tokens are many times
BAR_TIMES_MAX: Final = 3.0  # the ideal, at which a bar is full
ANY: Final = "*"  # workload, in a file of causes

Causes = Mapping[tuple[str, str], str]  # by workload and name of a measure


def bench_page(
    results: Results, causes: Causes | None = None, abouts: Mapping[str, str] | None = None
) -> str:
    """Return the page of a run. `abouts` has a sentence for each workload, by its name."""
    # What a server or a model is called, and its errors, are text, whatever they say.
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found, servers = list(comparisons(results)), sorted(results.servers, key=HEARTH.__ne__)
    workloads = list(dict.fromkeys(workload for _, _, workload in results.places()))
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        results=results,
        servers=servers,
        can_compare=results.rounds >= ROUNDS_MIN and len(servers) > 1,
        tally=Counter(each.standing for each in found),
        ideals=_ideals(results, workloads, servers),
        behind=_behind(found, list(results.models), causes or {}),
        tables=_tables(results, found, workloads, servers),
        abouts=abouts or {},
        errors=_errors(results),
    )


def parsed_causes(text: str) -> Causes:
    """Read why Hearth is behind: `## workload / measure` (name or label), and text below it.

    Raises:
        ValueError: a section names no measure.
    """
    names = {name: each.name for each in MEASURES.values() for name in (each.name, each.label)}
    found: dict[tuple[str, str], str] = {}
    below: tuple[str, str] | None = None
    for row in text.splitlines():
        if row.startswith("## "):
            workload, _, name = row.removeprefix("## ").strip().partition(" / ")
            if name not in names:
                raise ValueError(f"{row:.300} names no measure; there are: {', '.join(MEASURES)}")
            below = workload, names[name]
        elif row.startswith("# "):
            below = None
        elif below:
            found[below] = f"{found.get(below, '')}{row}\n"
    return found


def shown(value: float, unit: Unit) -> str:
    """Return the value with its unit, as a cell of a table has it."""
    match unit:
        case Unit.SHARE:
            return f"{100 * value:.0f} %"
        case Unit.SECONDS:
            return f"{_digits(1000 * value)} ms" if value < 0.1 else f"{_digits(value)} s"
        case Unit.BYTES:
            return f"{_digits(value / 1e6)} MB"
        case Unit.TIMES:
            return f"{value:.2f}"
    return f"{value:,.0f}" if value == round(value) else _digits(value)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _ideals(
    results: Results, workloads: Sequence[str], servers: Sequence[str]
) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return for each workload what servers read over its ideal on all models; a bar in percent."""
    rows = []
    for workload in workloads:
        ideal = results.cell(next(iter(results.models)), HEARTH, workload).numbers("ideal_tokens")
        cells = []
        for server in servers if ideal and min(ideal) >= IDEAL_TOKENS_MIN else ():
            told = [
                read_over(results, model, server, (workload,), "ideal_tokens")
                for model in results.models
            ]
            known = [each for each in told if each is not None]
            ends = [f"{each:.2f}" for each in (min(known), max(known))] if known else []
            bar = min(100.0, 100 * max(known, default=0.0) / BAR_TIMES_MAX)
            cells.append(("–".join(dict.fromkeys(ends)), round(bar)))
        rows += [(workload, cells)] if cells else []
    return rows


def _behind(found: Sequence[Comparison], models: Sequence[str], causes: Causes) -> dict[str, Any]:
    """Return the lines on which Hearth is behind, by measure and workload: a text for each model.

    Behind these stands the cause.
    """
    groups: dict[str, Any] = {}
    for each in found:
        if each.standing is Standing.BETTER:
            unit = each.measure.unit
            name = each.measure.name
            why = causes.get((each.workload, name)) or causes.get((ANY, name), "")
            rows = groups.setdefault(each.measure.label, {})
            texts, _ = rows.setdefault(each.workload, ({model: "" for model in models}, why))
            own = texts[each.model] or shown(each.own.median, unit)
            texts[each.model] = f"{own}, {each.server} {shown(each.other.median, unit)}"
    return groups


def _tables(
    results: Results, found: Sequence[Comparison], workloads: Sequence[str], servers: Sequence[str]
) -> dict[str, list[tuple[str, str, list[tuple[str, str, str]]]]]:
    """Return for each workload rows of measure, model and a cell a server: text, spread, mark."""
    every = lines(results)
    marks = {
        (each.model, each.server, each.workload, each.measure.name): str(each.standing)
        for each in found
    }
    tables: dict[str, list[tuple[str, str, list[tuple[str, str, str]]]]] = {}
    for workload in workloads:
        tables[workload] = []
        for measure in MEASURES.values():
            for model in results.models:
                keys = [(model, server, workload, measure.name) for server in servers]
                if any(key in every for key in keys):
                    cells = [
                        (*_cell(every.get(key), measure.unit), marks.get(key, "")) for key in keys
                    ]
                    tables[workload].append((measure.label, model, cells))
    return tables


def _cell(line: Line | None, unit: Unit) -> tuple[str, str]:
    """Return the median and half the range of the rounds as a share of it."""
    if line is None:
        return "–", ""
    spread = (max(line.values) - min(line.values)) / 2 / abs(line.median or 1)
    return shown(line.median, unit), f"±{100 * spread:.2g}%" if spread >= 0.0005 else ""


def _errors(results: Results) -> list[tuple[str, str, int]]:
    """Return what failed: server, text, how often."""
    counts: Counter[tuple[str, str]] = Counter()
    for model, server, workload in results.places():
        told = results.cell(model, server, workload).errors.values()
        counts.update((server, f"{workload}: {text}") for texts in told for text in texts)
    return [(*each, count) for each, count in counts.items()]
