"""Draws lines of a run as dots with the range of their rounds, in SVG as wide as its place.

A server is told by shape, by colour (those of Okabe and Ito) and by its name where there is room.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from hearth.commands.bench.measures import Measure, Unit
from hearth.commands.bench.page.markup import Html, joined, tag
from hearth.commands.bench.page.page_lines import PageLines
from hearth.commands.bench.page.value_format import brief, shown, spread
from hearth.commands.bench.page.value_scale import ValueScale
from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.statistics import Line

# Paths around (0, 0), some 9 pixels wide: circle, square, triangle, diamond, ...
SHAPES: Final = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4h8v8h-8z",
    "M0-5L5 4h-10z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "M0 5L5-4h-10z",
    "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
    "M-5 0L-2.5-4.5h5L5 0L2.5 4.5h-5z",
    "M-5-3.5L0 0L-5 3.5zM5-3.5L0 0L5 3.5z",
)
ROW_PX: Final = 22
NAMES_PX: Final = 13  # above and below the dots of a row with names
WIDTH_PX: Final = 250  # the narrowest that a row is drawn at: names are placed for it
LETTER_PX: Final = 5.9
MOVED: Final = 6.0  # per cent: a row is named anew where a dot is that far from the last names
EDGE: Final = 22.0  # per cent from the sides at which a name begins or ends at its dot


def shape_defs() -> Html:
    """Return the shapes, once for the page."""
    shapes = (tag("path", id=f"shape{at}", d=each) for at, each in enumerate(SHAPES))
    return tag("svg", tag("defs", *shapes), width=0, height=0, class_="defs", aria_hidden="true")


def mark(server_at: int, x: str, y: float) -> Html:
    """Return a server's shape at a place."""
    at = server_at % len(SHAPES)
    return tag("use", href=f"#shape{at}", x=x, y=y, class_=f"s{at}")


def legend(servers: Sequence[str], names: Sequence[str]) -> Html:
    """Return which shape is which server."""
    items = (
        tag("li", tag("svg", mark(servers.index(name), "7", 7), width=14, height=14,
                      aria_hidden="true"), " ", name)
        for name in names
    )  # fmt: skip
    return tag("ul", *items, class_="legend")


def strip(
    line: Line, scale: ValueScale, label: str, *, is_hearth: bool, ideal: float | None
) -> Html:
    """Return one server's value on an axis of its own row, and the ideal as a tick."""
    parts = [tag("line", x1="0", x2="100%", y1=9, y2=9, class_="rail")]
    if ideal is not None:
        at = f"{scale.place(ideal)}%"
        parts.append(tag("line", x1=at, x2=at, y1=2, y2=16, class_="ideal"))
    low, high = (f"{scale.place(each)}%" for each in (line.low, line.high))
    own = "s0" if is_hearth else "sx"
    parts.append(tag("line", x1=low, x2=high, y1=9, y2=9, class_=f"range {own}"))
    parts.append(tag("circle", cx=f"{scale.place(line.median)}%", cy=9, r=4.5, class_=own))
    return tag("svg", *parts, role="img", aria_label=label, height=18, width="100%")


def plot(lines: PageLines, measure: Measure, workloads: Sequence[str]) -> Html | None:
    """Return a figure: a facet a model, a row a workload; None if nothing was measured."""
    rows = {
        model: {name: found for name in workloads
                if (found := lines.of(model, name, measure.name))}
        for model in lines.models
    }  # fmt: skip
    rows = {model: of_model for model, of_model in rows.items() if of_model}
    values = [value for of_model in rows.values() for found in of_model.values()
              for line in found.values() for value in (line.low, line.high)]  # fmt: skip
    if not values:
        return None
    scale = ValueScale.of(values)
    met = {server for of_model in rows.values() for found in of_model.values() for server in found}
    direction = "more is better" if measure.is_more_better else "less is better"
    title = joined(measure.label, tag("span", f" · {direction}" + " · logarithmic" * scale.is_log))
    facets = (_facet(lines, model, of_model, measure, scale) for model, of_model in rows.items())
    return tag(
        "figure",
        tag("figcaption", tag("b", title)),
        legend(lines.servers, [name for name in lines.servers if name in met]),
        tag("div", *facets, class_="facets"),
        class_="plot",
    )


def _facet(
    lines: PageLines,
    model: str,
    rows: Mapping[str, Mapping[str, Line]],
    measure: Measure,
    scale: ValueScale,
) -> Html:
    drawn: list[Html] = []
    named: dict[str, float] = {}
    for workload, found in rows.items():
        places = {name: scale.place(line.median) for name, line in found.items()}
        is_named = _is_moved(places, named)
        named = places if is_named else named
        row = _row(lines, found, measure, scale, workload, is_named)
        drawn.append(joined(tag("span", workload, class_="what"), row))
    label = lines.results.models[model].label if model in lines.results.models else model
    return tag(
        "div", tag("p", label, class_="model"), *drawn, _axis(measure, scale), class_="facet"
    )


def _row(
    lines: PageLines,
    found: Mapping[str, Line],
    measure: Measure,
    scale: ValueScale,
    workload: str,
    is_named: bool,
) -> Html:
    said = "; ".join(f"{name} {shown(line.median, measure.unit)}" for name, line in found.items())
    height = ROW_PX + 2 * NAMES_PX * is_named
    middle_px = height / 2
    parts = [tag("line", x1="0", x2="100%", y1=middle_px, y2=middle_px, class_="rail")]
    parts += _grid(scale, height)
    # Hearth is drawn last, on top of the others.
    for name, line in reversed(list(found.items())):
        at = lines.servers.index(name)
        low, high, middle = (f"{scale.place(x)}%" for x in (line.low, line.high, line.median))
        kind = f"range s{at % len(SHAPES)}"
        parts.append(tag("line", x1=low, x2=high, y1=middle_px, y2=middle_px, class_=kind))
        told = f"{name} {shown(line.median, measure.unit)}"
        between = spread(line.low, line.high, measure.unit)
        hover = tag("title", told + (f" ({between})" if between else ""))
        parts.append(tag("g", mark(at, middle, middle_px), hover))
    if is_named:
        parts += _names({name: scale.place(line.median) for name, line in found.items()}, height)
    label = f"{workload}, {measure.label}: {said}"
    return tag("svg", *parts, role="img", aria_label=label, height=height, width="100%")


def _is_moved(places: Mapping[str, float], named: Mapping[str, float]) -> bool:
    """Return whether the names beside earlier dots no longer tell which server a dot is."""
    return set(places) != set(named) or any(
        abs(place - named[name]) > MOVED for name, place in places.items()
    )


def _grid(scale: ValueScale, height: float) -> list[Html]:
    places = (f"{scale.place(value)}%" for value in scale.ticks())
    return [tag("line", x1=at, x2=at, y1=0, y2=height, class_="grid") for at in places]


def _names(places: Mapping[str, float], height: float) -> list[Html]:
    """Place names above their dots, else below, where they hit no other; else leave them out."""
    lanes: tuple[list[tuple[float, float]], ...] = ([], [])
    found = []
    for name, place in sorted(places.items(), key=lambda pair: (pair[0] != HEARTH, pair[1])):
        anchor = "start" if place < EDGE else "end" if place > 100 - EDGE else "middle"
        wide = 100 * LETTER_PX * len(name) / WIDTH_PX
        shift = {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        begin, end = place - shift - 1, place - shift + wide + 1
        for lane, y in zip(lanes, (10, height - 3), strict=True):
            if all(end <= left or begin >= right for left, right in lane):
                lane.append((begin, end))
                own = "name own" if name == HEARTH else "name"
                found.append(tag("text", name, x=f"{place}%", y=y, text_anchor=anchor, class_=own))
                break
    return found


def _axis(measure: Measure, scale: ValueScale) -> Html:
    ticks = scale.ticks()
    texts = (
        tag("text", _tick(value, measure.unit), x=f"{scale.place(value)}%", y=11,
            text_anchor="start" if scale.place(value) < 8 else "middle")
        for value in ticks
    )  # fmt: skip
    axis = tag("svg", *texts, height=16, width="100%", class_="axis", aria_hidden="true")
    return joined(tag("span", class_="what"), axis)


def _tick(value: float, unit: Unit) -> str:
    match unit:
        case Unit.TOKENS | Unit.COUNT:
            return brief(value)
        case Unit.TIMES:
            return f"{value:g}×"
        case Unit.SHARE:
            return f"{100 * value:g} %"
        case Unit.SECONDS:
            return f"{value:g} s" if value == 0 or value >= 1 else f"{1000 * value:g} ms"
        case _:
            return shown(value, unit)
