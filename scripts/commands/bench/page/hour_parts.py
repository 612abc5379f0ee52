"""Tells what each part of an agent's hour adds to it, for a reader whose hours are others."""

from collections.abc import Iterator, Sequence

from hearth.commands.bench.page.agent_hour import READ, AgentHour, HourCost
from hearth.commands.bench.page.markup import Html, joined, tag
from hearth.commands.bench.page.page_lines import PageLines
from hearth.commands.bench.page.value_format import shown


def parts_table(lines: PageLines, hours: Sequence[AgentHour]) -> Html:
    """Return the tokens of each part on each server, closed until it is asked for."""
    told = [hour for hour in hours if any(cost.read for cost in hour.costs)]
    if not told:
        return joined()
    heads = (tag("th", name, scope="col", class_="n") for name in lines.servers)
    bodies = (_rows(lines, hour) for hour in told)
    table = tag("table", tag("thead", tag("tr", tag("td"), *heads)), *bodies, class_="values")
    summary = tag("summary", tag("b", "What each part of the hour adds"), ", in tokens read")
    box = tag("div", table, class_="box", tabindex=0, role="region", aria_label="parts of the hour")
    return tag("details", summary, box)


def _rows(lines: PageLines, hour: AgentHour) -> Html:
    costs = {cost.server: cost for cost in hour.costs}
    label = lines.results.models[hour.model].label if hour.model in lines.results.models else ""
    title = tag("th", label or hour.model, scope="rowgroup", colspan=len(lines.servers) + 1)
    rows = [
        tag("tr", tag("th", f"{part.times} {part.what}", scope="row"),
            *_cells(costs[name].read.get(part.workload) if name in costs else None
                    for name in lines.servers))
        for part in hour.parts
    ]  # fmt: skip
    without = _cells(_uncancelled(costs.get(name)) for name in lines.servers)
    last = tag("tr", tag("th", "all but the cancelled prompts", scope="row"), *without)
    return tag("tbody", tag("tr", title, class_="model"), *rows, last)


def _uncancelled(cost: HourCost | None) -> float | None:
    return cost.read_uncancelled if cost else None


def _cells(values: Iterator[float | None]) -> Iterator[Html]:
    return (tag("td", "–" if each is None else shown(each, READ.unit)) for each in values)
