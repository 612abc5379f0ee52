"""Writes the one HTML page of a run: nothing in it is fetched, and it needs no script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hearth.commands.bench.page.causes import Causes
from hearth.commands.bench.page.dot_plots import shape_defs
from hearth.commands.bench.page.markup import Html, joined, tag
from hearth.commands.bench.page.method import method, standing_notice
from hearth.commands.bench.page.page_lines import PageLines
from hearth.commands.bench.page.story import story
from hearth.commands.bench.page.value_format import counted
from hearth.commands.bench.page.workload_sections import kinds_of, workload_sections
from hearth.commands.bench.results import Results

STYLE: Final = Path(__file__).with_name("bench_page.css")
TITLE: Final = "What the prompts of an agent’s hour cost"
# Nothing is loaded and nothing runs, whatever a server's version or error says.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
ENDS: Final = (("remarks", "Remarks"), ("repeat", "Repeat a line"), ("where", "Measured where"))


def bench_page(
    results: Results,
    causes: Causes | None = None,
    abouts: Mapping[str, str] | None = None,
) -> str:
    """Return the page of a run. `abouts` has a sentence for each workload, by its name."""
    lines = PageLines(results)
    causes, abouts = causes or Causes(), abouts or {}
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"hearth bench: {TITLE}"),
        tag("style", Html(STYLE.read_text())),
    )
    main = tag(
        "main",
        standing_notice(results),
        story(lines, causes),
        _contents(lines),
        workload_sections(lines, causes, abouts),
        method(lines, causes, abouts),
    )
    body = tag("body", shape_defs(), _header(lines), main)
    return joined(Html("<!doctype html>\n"), tag("html", head, body, lang="en")) + "\n"


def _header(lines: PageLines) -> Html:
    results = lines.results
    told = (
        f"hearth bench {results.version}",
        counted(len(lines.servers), "server"),
        counted(len(lines.models), "model"),
        counted(len(lines.workloads), "workload"),
        f"{counted(lines.rounds, 'round')}, interleaved",
        results.machine,
        results.began[:10],
    )
    return tag("header", tag("h1", TITLE), tag("p", " · ".join(filter(None, told))))


def _contents(lines: PageLines) -> Html:
    places = [(kind.anchor, kind.title) for kind in kinds_of(lines)]
    items = (tag("li", tag("a", title, href=f"#{at}")) for at, title in (*places, *ENDS))
    return tag("nav", tag("ul", *items), aria_label="Sections")
