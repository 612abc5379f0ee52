"""The bench page in a real browser: light, dark, on a phone and printed.

Pictures go where HEARTH_ARTEFACTS says.
"""

import asyncio
import base64
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pypdf
import pytest

from hearth.commands.bench.page.bench_page import bench_page
from hearth.commands.bench.page.causes import Causes
from tests.helpers.bench.made_results import ABOUTS, made_results
from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import NEEDS_CHROMIUM, Page, chromium, page

pytestmark = NEEDS_CHROMIUM
CHECKS: Final = (Path(__file__).parents[3] / "helpers" / "clients" / "page_checks.js").read_text()
LOOKS: Final = {
    "light": (1280, 860, "light"),
    "dark": (1280, 860, "dark"),
    "phone": (390, 844, "light"),
}
# Enough for each kind of plot and table; what a browser takes grows with the page.
PLAYED: Final = {"linear", "sub-agents", "cancel-0s", "restart", "images", "streams-4"}
OPEN_ALL: Final = "document.querySelectorAll('details').forEach((each) => (each.open = true))"
CHECKED: Final = "({text: checks.text(), overflow: checks.overflow()})"
# Marks of plots against what is behind them, as [ratio, class] of those that graphics need more of.
FAINT: Final = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((each) => {
      const share = each / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll("use, .strip circle, .ideal")].map((each) => {
    const style = getComputedStyle(each);
    const own = light(each.matches(".ideal") ? style.stroke : style.fill);
    const ratio = (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
    return [ratio, each.getAttribute("class")];
  });
})()"""
# Bottoms of what the first screen has to show.
FIRST: Final = """['.lead', '.tally a', '.hour'].map(
  (each) => document.querySelector(each).getBoundingClientRect().bottom)"""


@dataclass
class Seen:
    """What the page showed, by look."""

    checked: dict[str, dict[str, Any]] = field(default_factory=dict)
    marks: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    findings: dict[str, list[str] | None] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)
    named: list[tuple[str, str]] = field(default_factory=list)
    printed: str = ""
    errors: list[str] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)


async def look(tab: Page, url: str, name: str, seen: Seen, artefacts: Path | None) -> None:
    """Look at the page in one way: as it opens, then with all tables open."""
    await tab.look(*LOOKS[name])
    await tab.open(url)
    await tab.value(CHECKS)
    seen.first[name] = await tab.value(FIRST)
    seen.findings[name] = await serious_findings(tab)
    if artefacts is not None:
        await tab.shoot(artefacts / f"bench-page-{name}.png", whole=False)
    await tab.value(OPEN_ALL)
    seen.checked[name] = await tab.value(CHECKED)
    seen.marks[name] = await tab.value(FAINT)


async def visit(devtools: str, file: Path, artefacts: Path | None) -> Seen:
    seen = Seen()
    async with page(devtools) as tab:
        for name in LOOKS:
            await look(tab, file.as_uri(), name, seen, artefacts)
        await tab.open(file.as_uri())
        seen.named = await tab.names()
        pdf = base64.b64decode((await tab.call("Page.printToPDF"))["data"])
        pages = pypdf.PdfReader(io.BytesIO(pdf)).pages
        seen.printed = " ".join(each.extract_text() for each in pages)
        seen.errors, seen.requests = tab.errors, set(tab.requests)
    return seen


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "bench.html"
    causes = Causes.parsed("## * / memory\nHearth is two processes.\n")
    made = made_results(models=("qwen3", "qwen3_5_vl"))
    made.samples = [each for each in made.samples if each.workload in PLAYED]
    path.write_text(bench_page(made, causes, ABOUTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def seen(file: Path) -> Seen:
    wanted = os.environ.get("HEARTH_ARTEFACTS")
    artefacts = Path(wanted) if wanted else None
    if artefacts is not None:
        artefacts.mkdir(parents=True, exist_ok=True)
    with chromium() as devtools:
        return asyncio.run(visit(devtools, file, artefacts))


@pytest.mark.parametrize("name", LOOKS)
def test_all_text_can_be_read_and_the_page_fits_its_window(seen: Seen, name: str) -> None:
    checked = seen.checked[name]
    assert checked["text"]["count"] > 500
    assert checked["text"]["short"] == []
    assert checked["overflow"] == 0


@pytest.mark.parametrize("name", LOOKS)
def test_every_mark_of_a_plot_can_be_seen(seen: Seen, name: str) -> None:
    marks = seen.marks[name]
    assert len(marks) > 60
    assert [mark for mark in marks if mark[0] < 3] == []


@pytest.mark.parametrize("name", LOOKS)
def test_nothing_is_seriously_wrong_by_axe(seen: Seen, name: str) -> None:
    if seen.findings[name] is None:
        pytest.skip("axe-core cannot be installed here")
    assert seen.findings[name] == []


def test_the_first_screen_has_the_costs_and_where_hearth_is_behind(seen: Seen) -> None:
    for name in ("light", "dark"):
        assert max(seen.first[name]) < LOOKS[name][1], seen.first[name]
    lead, behind, _ = seen.first["phone"]
    assert max(lead, behind) < LOOKS["phone"][1]


def test_plots_have_words_for_those_who_see_none(seen: Seen) -> None:
    drawn = [name for role, name in seen.named if role in ("image", "img", "graphics-document")]
    assert len(drawn) > 20
    assert all(any(letter.isdigit() for letter in name) for name in drawn), drawn[:5]


def test_closed_tables_are_printed_too(seen: Seen) -> None:
    assert "forwards a token" in seen.printed
    assert "Hearth is two processes." in seen.printed


def test_it_fetches_nothing_and_nothing_goes_wrong(seen: Seen, file: Path) -> None:
    assert seen.errors == []
    assert seen.requests == {file.as_uri()}
