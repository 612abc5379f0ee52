"""Writes the section of each workload kind: the lines behind, then plots, then tables."""

from collections.abc import Mapping, Sequence

from hearth.commands.bench.measures import Measure
from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.page.dot_plots import plot
from hearth.commands.bench.page.markup import Html, joined, tag, with_code
from hearth.commands.bench.page.page_lines import LineBehind, PageLines
from hearth.commands.bench.page.story import CLAIMED, MARKS, label_of
from hearth.commands.bench.page.value_format import counted, shown, spread
from hearth.commands.bench.page.workload_kinds import KINDS, OTHERS, WorkloadKind, kind_of
from hearth.commands.bench.results import HEARTH


def workload_sections(lines: PageLines, causes: Causes, abouts: Mapping[str, str]) -> Html:
    """Return all sections. `abouts` has a sentence a workload."""
    return joined(*(_section(lines, kind, causes, abouts) for kind in kinds_of(lines)))


def kinds_of(lines: PageLines) -> list[WorkloadKind]:
    """Return the kinds that something was measured of, in the page's order."""
    met = {kind_of(name).anchor for name in lines.workloads}
    return [kind for kind in (*KINDS, OTHERS) if kind.anchor in met]


def _section(
    lines: PageLines, kind: WorkloadKind, causes: Causes, abouts: Mapping[str, str]
) -> Html:
    workloads = [name for name in lines.workloads if kind_of(name) is kind]
    figures = [plot(lines, measure, workloads) for measure in _drawn(lines, kind, workloads)]
    return tag(
        "section",
        tag("h2", kind.title, id=kind.anchor),
        tag("p", kind.about) if kind.about else "",
        behind_table(lines, workloads, causes),
        *(figure for figure in figures if figure is not None),
        *(_table(lines, name, abouts.get(name, "")) for name in workloads),
    )


def _drawn(lines: PageLines, kind: WorkloadKind, workloads: Sequence[str]) -> list[Measure]:
    known = {measure.name: measure for name in workloads for measure in lines.measures(name)}
    return [known[name] for name in kind.drawn if name in known]


def behind_table(lines: PageLines, workloads: Sequence[str], causes: Causes) -> Html:
    """Return the lines on which Hearth is behind: a measure a group, a workload a row."""
    groups = lines.behind_by_measure(workloads)
    behind = [each for group in groups for each in group]
    if not behind:
        none = "Hearth is behind on no line here."
        few = f"{counted(lines.rounds, 'round')} cannot tell on which lines Hearth is behind."
        return tag("p", none if lines.can_compare else few, class_="none-behind")
    models = [name for name in lines.models if any(each.model == name for each in behind)]
    bodies = (_behind_group(lines, group, models, causes) for group in groups)
    names = ("", *(label_of(lines, name) for name in models))
    head = tag("tr", *(tag("th" if name else "td", name, scope="col") for name in names))
    title = tag("caption", f"Hearth is behind on {counted(len(behind), 'line')}")
    table = tag("table", title, tag("thead", head), *bodies, class_="lines-behind")
    return _box(table, "lines on which Hearth is behind")


def _behind_group(
    lines: PageLines, group: Sequence[LineBehind], models: Sequence[str], causes: Causes
) -> Html:
    measure = group[0].measure
    span = len(models) + 1
    title = tag("th", measure.label, scope="rowgroup", colspan=span)
    rows = [tag("tr", title, class_="measure")]
    told: tuple[str, ...] = ()
    for workload in (
        name for name in lines.workloads if any(each.workload == name for each in group)
    ):
        of_model = {each.model: each for each in group if each.workload == workload}
        cells = (_behind_cell(of_model.get(model)) for model in models)
        rows.append(tag("tr", tag("th", workload, scope="row"), *cells))
        paragraphs = causes.of(workload, measure)
        if paragraphs != told:  # one cause of several workloads is told once
            rows.append(_cause_row(paragraphs, span))
        told = paragraphs
    if not told and len(rows) == 1 + len({each.workload for each in group}):
        rows.append(_cause_row(("No cause was written down.",), span))
    return tag("tbody", *rows)


def _cause_row(paragraphs: Sequence[str], span: int) -> Html:
    texts = (tag("p", with_code(text)) for text in paragraphs)
    return tag("tr", tag("td", *texts, colspan=span), class_="cause")


def _behind_cell(each: LineBehind | None) -> Html:
    if each is None:
        return tag("td")
    unit = each.measure.unit
    own = each.hearth
    between = spread(own.low, own.high, unit)
    others = [tag("span", f"{server} {shown(line.median, unit)}") for server, line in each.ahead]
    parts = (joined(", " if at else "", text) for at, text in enumerate(others))
    value = tag("b", shown(own.median, unit))
    return tag("td", value, f" ({between})" if between else "", tag("i", *parts))


def _table(lines: PageLines, workload: str, about: str) -> Html:
    """Return all that was measured of one workload, closed until it is asked for."""
    measures = lines.measures(workload)
    servers = [
        name
        for name in lines.servers
        if any(lines.samples(model, name, workload) for model in lines.models)
    ]
    heads = (tag("th", name, scope="col", class_="n own" if name == HEARTH else "n")
             for name in servers)  # fmt: skip
    head = tag("thead", tag("tr", tag("td"), *heads))
    bodies = (
        _model_rows(lines, model, workload, measures, servers)
        for model in lines.models
        if any(lines.samples(model, name, workload) for name in servers)
    )
    table = tag("table", head, *bodies, class_="values")
    behind = sum(1 for each in lines.behind if each.workload == workload)
    told = f"behind on {counted(behind, 'line')}" if behind else "behind on none"
    summary = tag("summary", tag("b", workload), " ", about, " ", tag("span", told, class_="soft"))
    return tag("details", summary, _box(table, f"all measures of {workload}"))


def _model_rows(
    lines: PageLines,
    model: str,
    workload: str,
    measures: Sequence[Measure],
    servers: Sequence[str],
) -> Html:
    label = tag("th", label_of(lines, model), scope="rowgroup", colspan=len(servers) + 1)
    rows = [tag("tr", label, class_="model")]
    for measure in measures:
        found = lines.of(model, workload, measure.name)
        if found:
            cells = (_cell(lines, model, workload, measure, name) for name in servers)
            kind = "soft" if measure.is_more_better is None else None
            rows.append(tag("tr", tag("th", measure.label, scope="row"), *cells, class_=kind))
    return tag("tbody", *rows)


def _cell(lines: PageLines, model: str, workload: str, measure: Measure, server: str) -> Html:
    line = lines.line(model, server, workload, measure.name)
    if line is None:
        return tag("td", "–")
    found = lines.standing(model, server, workload, measure)
    kind = MARKS.get(found) if found else "own" if server == HEARTH else None
    between = spread(line.low, line.high, measure.unit)
    parts = (tag("i", between),) if between else ()
    value = shown(line.median, measure.unit) + CLAIMED * line.is_claimed
    return tag("td", value, *parts, class_=kind)


def _box(table: Html, label: str) -> Html:
    """Return a table that scrolls in a box of its own where the window is narrow."""
    return tag("div", table, class_="box", tabindex=0, role="region", aria_label=label)
