"""Tells on one screen what an agent's hour costs on each server, and where Hearth is behind."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from hearth.commands.bench.measures import Measure
from hearth.commands.bench.page.agent_hour import (
    COSTS,
    CPU,
    READ,
    WAIT,
    AgentHour,
    HourCost,
    agent_hour,
    hour_parts,
)
from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.page.dot_plots import strip
from hearth.commands.bench.page.hour_parts import parts_table
from hearth.commands.bench.page.markup import Html, joined, safe, tag, with_code
from hearth.commands.bench.page.page_lines import (
    ROUNDS_MIN,
    LineBehind,
    PageLines,
    Standing,
    standing,
)
from hearth.commands.bench.page.value_format import about, brief, counted, listed, shown, spread
from hearth.commands.bench.page.value_scale import ValueScale
from hearth.commands.bench.page.workload_kinds import kind_of
from hearth.commands.bench.results import HEARTH, ModelFacts

CLAIMED: Final = "†"  # behind tokens that the meter could not count
# The classes of cells.
MARKS: Final = {
    Standing.BETTER: "b",
    Standing.SAME: "e",
    Standing.FAILED: "x",
}
NAMED_MAX: Final = 5  # measures, in a sentence
# What cannot be told apart is not said to be equal.
VERBS: Final = {
    READ: ("reads the fewest tokens", "reads no more than the best", "reads more than"),
    WAIT: ("answers first", "waits no longer than the best", "waits longer than"),
    CPU: ("takes the least CPU", "takes no more CPU than the best", "takes more CPU than"),
}
AS_TOLD: Final = " as far as these rounds tell"


def story(lines: PageLines, causes: Causes) -> Html:
    """Return the first screen."""
    hours = [agent_hour(lines, model) for model in lines.models]
    return joined(_hours(lines, hours), _behind(lines, causes))


def _hours(lines: PageLines, hours: Sequence[AgentHour]) -> Html:
    if not hour_parts(lines):
        return tag("p", "No workload of an agent's hour was measured in this run.", class_="lead")
    said = _lead(lines, hours)
    panels = (_panel(lines, hour) for hour in hours if hour.costs)
    return joined(
        tag("p", *said, class_="lead"),
        _standing(lines) or "",
        tag("div", *panels, class_="hours"),
        _how_to_read(lines),
        parts_table(lines, hours),
    )


def _lead(lines: PageLines, hours: Sequence[AgentHour]) -> list[Html]:
    """Return the sentences of what can be said of the hour."""
    if lines.servers[:1] != [HEARTH] or len(lines.servers) == 1:
        return [safe("Hearth and another server are needed in a run: there is nothing to compare.")]
    much = _how_much(hours)
    if not lines.can_compare:
        few = f"{counted(lines.rounds, 'round')} cannot tell servers apart: it takes {ROUNDS_MIN}. "
        return [tag("strong", few), safe(f"Hearth reads {much}" if much else "")]
    first, *others = (_sentence(lines, hours, cost) for cost in COSTS)
    told = safe(f"That is {much}") if first and much else None
    return [each for each in (first, told, *others) if each]


def _sentence(lines: PageLines, hours: Sequence[AgentHour], cost: Measure) -> Html | None:
    """Say on which models Hearth costs least, as little as the best, and more than whom."""
    verbs = VERBS[cost]
    models: dict[str, list[str]] = {}  # by what is said of them
    for hour in hours:
        found = {each.server: each.lines[cost.name] for each in hour.costs if is_whole(each, cost)}
        own = found.pop(HEARTH, None)
        if own is None or not found:
            continue
        told = {server: standing(own, line, cost) for server, line in found.items()}
        ahead = [server for server, each in told.items() if each is Standing.BETTER]
        is_equal = Standing.SAME in told.values()
        equal = verbs[1] + AS_TOLD if is_equal else verbs[0]
        said = f"{verbs[2]} {listed(ahead)}" if ahead else equal
        models.setdefault(said, []).append(label_of(lines, hour.model))
    if not models:
        return None
    parts = [f"{said}{_on(lines, names)}" for said, names in models.items()]
    return joined(
        "In an agent’s hour Hearth " if cost is READ else "It ", "; it ".join(parts), ". "
    )


def _how_much(hours: Sequence[AgentHour]) -> str:
    """Say how much Hearth reads, over the ideal, and the others over Hearth."""
    over_ideal, others, uncancelled = [], [], []
    for hour in hours:
        costs = {each.server: each for each in hour.costs if is_whole(each, READ)}
        own = costs.pop(HEARTH, None)
        if own is None or not (read := own.lines[READ.name].median):
            continue
        if hour.ideal:
            over_ideal.append(read / hour.ideal)
        for each in costs.values():
            if not each.lines[READ.name].is_claimed:  # what a server says of itself is no count
                others.append(each.lines[READ.name].median / read)
                if each.read_uncancelled and own.read_uncancelled:
                    uncancelled.append(each.read_uncancelled / own.read_uncancelled)
    if not over_ideal or not others:
        return ""
    ideal, more = _between(over_ideal), _between(others)
    told = f"{ideal} times the ideal; the others read {more} times as much as Hearth"
    if uncancelled and _between(uncancelled) != more:
        told += f", and {_between(uncancelled)} times without the cancelled prompts"
    return f"{told}. "


def _between(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _standing(lines: PageLines) -> Html | None:
    """Say how many comparisons went which way, and what Hearth is behind on."""
    counts = Counter(lines.standings())
    if not counts:
        return None
    groups = lines.behind_by_measure(lines.workloads)
    names = list(dict.fromkeys(group[0].measure.label.split(",")[0] for group in groups))
    more = f" and {counted(len(names) - NAMED_MAX, 'more measure')}"
    which = listed(names) if len(names) <= NAMED_MAX + 1 else ", ".join(names[:NAMED_MAX]) + more
    return tag(
        "p",
        f"Over all {counts.total() - counts[Standing.FAILED]:,} comparisons with another server "
        "it is ahead in "
        f"{counts[Standing.WORSE]:,}, can’t be told apart in {counts[Standing.SAME]:,}, and ",
        tag("a", f"behind in {counts[Standing.BETTER]:,}", href="#behind"),
        f" ({which})." if which else ".",
        _not_compared(counts[Standing.FAILED]),
        _by_chance(lines),
        class_="tally",
    )


def _not_compared(count: int) -> str:
    """Say how many comparisons are left out, those that Hearth's own failures spare it too."""
    if not count:
        return ""
    many = "One more was" if count == 1 else f"{count:,} more were"
    return f" {many} not compared, as requests failed or other work was done."


def _by_chance(lines: PageLines) -> str:
    """Say how many of the comparisons would come out one way or the other for no reason."""
    if not lines.can_compare:
        return ""
    return (
        f" If all servers were alike, up to {lines.by_chance():,.0f} would differ by chance, half"
        " of them each way. Measures of one workload go together: they are no independent votes."
    )


def _on(lines: PageLines, names: Sequence[str]) -> str:
    if len(lines.models) == 1:
        return ""
    return (
        f" on all {len(names)} models"
        if len(names) == len(lines.models)
        else f" on {listed(names)}"
    )


def is_whole(cost: HourCost, measure: Measure) -> bool:
    """Return whether a server's hour is comparable: all of it answered."""
    return measure.name in cost.lines and not cost.missing and not cost.failed


def label_of(lines: PageLines, model: str) -> str:
    """Return a model's name as it is shown."""
    return lines.results.models[model].label if model in lines.results.models else model


def model_line(facts: ModelFacts) -> str:
    """Return what a model is, in a few words."""
    bits = f", {facts.bits} bits" if facts.bits else ""
    return f"{facts.kind}, {brief(facts.bytes)}B{bits}"


def _panel(lines: PageLines, hour: AgentHour) -> Html:
    read = [cost.lines[READ.name] for cost in hour.costs if READ.name in cost.lines]
    ends = [line.high for line in read] + [hour.ideal or 0.0]
    scale = ValueScale.of([0.0, *ends], can_be_log=False)
    own = next((cost for cost in hour.costs if cost.server == HEARTH), None)
    rows = (_hour_row(cost, own, scale, hour.ideal) for cost in sorted(hour.costs, key=_reads))
    facts = lines.results.models.get(hour.model)
    told = model_line(facts) if facts else ""
    if hour.ideal is not None:
        told += f" · ideal {shown(hour.ideal, READ.unit)} tokens"
    heads = (tag("th", each.label, scope="col", class_="n") for each in COSTS)
    head = tag("tr", tag("th", "server", scope="col"), tag("td"), *heads)
    title = tag("caption", tag("b", label_of(lines, hour.model)), " ", tag("span", told))
    return tag("table", title, tag("thead", head), tag("tbody", *rows), class_="hour")


def _reads(cost: HourCost) -> float:
    """Return what servers are put in order by; those without a whole hour come last."""
    return cost.lines[READ.name].median if READ.name in cost.lines else float("inf")


def _hour_row(cost: HourCost, own: HourCost | None, scale: ValueScale, ideal: float | None) -> Html:
    is_hearth = cost.server == HEARTH
    name = tag("th", cost.server, scope="row")
    kind = "own" if is_hearth else None
    if cost.missing:
        why = f"no whole hour: nothing of {listed(cost.missing)}"
        if not cost.read:
            why = "it answered nothing with this model; the remarks tell why"
        return tag("tr", name, tag("td", why, colspan=4, class_="soft"), class_=kind)
    read = cost.lines.get(READ.name)
    drawn = joined()
    if read is not None:
        label = f"{cost.server}: {shown(read.median, READ.unit)} tokens"
        drawn = strip(read, scale, label, is_hearth=is_hearth, ideal=ideal)
    cells = [_hour_cell(cost, own, measure) for measure in COSTS]
    row = tag("tr", name, tag("td", drawn, class_="strip"), *cells, class_=kind)
    if not cost.failed:
        return row
    note = f"{counted(cost.failed, 'request')} failed: what failed was not read, and not compared"
    return joined(row, tag("tr", tag("td"), tag("td", note, colspan=4, class_="soft")))


def _hour_cell(cost: HourCost, own: HourCost | None, measure: Measure) -> Html:
    line = cost.lines.get(measure.name)
    if line is None:
        return tag("td", "–", class_="n")
    kind = "n"
    if own and cost is not own and is_whole(cost, measure) and is_whole(own, measure):
        kind += " " + MARKS.get(standing(own.lines[measure.name], line, measure), "")
    value = brief(line.median) if measure is READ else shown(line.median, measure.unit)
    spread_text = about(line.low, line.high, line.median)
    parts = (tag("i", spread_text),) if spread_text else ()
    exact = f"{spread(line.low, line.high, measure.unit) or shown(line.median, measure.unit)}"
    return tag(
        "td", tag("span", value + CLAIMED * line.is_claimed), *parts, class_=kind, title=exact
    )


def _how_to_read(lines: PageLines) -> Html:
    parts = [f"{part.times} {part.what}" for part in hour_parts(lines)]
    text = (
        f"An hour is {listed(parts)}: a mix that we made up, not one that was counted. Answers are "
        "not in it, each has one token: this is what prompts cost, not what an hour takes. A dot "
        f"is the median of {counted(lines.rounds, 'round')} and its bar their range, ± half of "
        "that; the thin upright is the ideal, what a cache that forgets nothing would read. To "
        "first tokens: requests times the median wait. "
    )
    return tag("p", text, marks_legend(), class_="note")


def marks_legend() -> Html:
    """Say what the marks at values mean."""
    return joined(
        tag("span", "better than Hearth", class_="b"),
        "; ",
        tag("span", "can’t be told apart from Hearth", class_="e"),
        "; ",
        tag("span", "not compared: requests failed, or other work was done", class_="x"),
        "; ",
        f"{CLAIMED} as the server itself says; no mark: worse.",
    )


def _behind(lines: PageLines, causes: Causes) -> Html:
    compared = sum(each is not Standing.FAILED for each in lines.standings())
    pairs = sum(len(each.ahead) for each in lines.behind)
    groups = lines.behind_by_measure(lines.workloads)
    if not groups:
        text = f"On none of {counted(compared, 'comparison')} with another server."
        if not lines.can_compare:
            text = f"{counted(lines.rounds, 'round')} cannot tell. The tables have the medians."
        return tag("section", _behind_title(), tag("p", text), class_="behind")
    text = (
        f"In {pairs:,} of {counted(compared, 'comparison')}, each of a measure of one workload and "
        "model with one server. Of each measure the widest; all stand first in their sections."
    )
    rows = (_behind_row(lines, group, causes) for group in groups)
    return tag("section", _behind_title(), tag("p", text), tag("ul", *rows), class_="behind")


def _behind_title() -> Html:
    return tag("h2", "Where Hearth is behind", id="behind")


def _behind_row(lines: PageLines, group: Sequence[LineBehind], causes: Causes) -> Html:
    worst = group[0]
    workloads = list(dict.fromkeys(each.workload for each in group))
    models = {each.model for each in group}
    where = (
        listed(workloads) if len(workloads) <= 3 else f"{len(workloads)} of "
        f"{counted(len(lines.workloads), 'workload')}"
    )  # fmt: skip
    if len(lines.models) > 1:
        where += f", {len(models)} of {counted(len(lines.models), 'model')}"
    server, line = worst.ahead[0]
    unit = worst.measure.unit
    example = (
        f"{worst.workload}, {label_of(lines, worst.model)}: {shown(worst.hearth.median, unit)}; "
        f"{server} {shown(line.median, unit)}"
    )
    anchor = f"#{kind_of(worst.workload).anchor}"
    cause = causes.first_line(worst.workload, worst.measure)
    why = tag("span", " ", with_code(cause), class_="cause") if cause else joined()
    label = tag("a", worst.measure.label, href=anchor)
    return tag("li", tag("b", label), f" ({where}). ", example, ".", why)
