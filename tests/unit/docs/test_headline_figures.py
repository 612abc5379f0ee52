"""README's line of figures is that of the results: none is typed by hand."""

from pathlib import Path

from hearth.commands.bench.headline import RESULTS, headline
from hearth.commands.bench.results import Results

ROOT = Path(__file__).parents[3]


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    told = headline(Results.load(ROOT / RESULTS))
    remedy = "put in what .venv/bin/python -m hearth.commands.bench.headline prints"
    assert f"\n{told}\n" in (ROOT / "README.md").read_text(), remedy


def test_results_and_report_are_small_in_git() -> None:
    sizes = {
        name: (ROOT / "bench" / name).stat().st_size for name in ("results.json", "report.html")
    }
    assert max(sizes.values()) <= 100_000, sizes
