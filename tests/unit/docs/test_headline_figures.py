"""README's figures are those of the results: none is typed by hand."""

from pathlib import Path

import pytest

from hearth.commands.bench.headline import RESULTS, figures, main, with_figures
from tests.helpers.bench.flat_results import headline_results

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
README_LINES_MAX = 150


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    text = README.read_text()
    remedy = "run .venv/bin/python -m hearth.commands.bench.headline --write README.md"
    assert text == with_figures(text, figures(ROOT / RESULTS)), remedy


def test_the_readme_has_room_for_the_longest_figures(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "README.md"
    headline_results(others=12).save(results)
    page.write_text(README.read_text())
    assert main(["--results", str(results), "--write", str(page)]) == 0
    assert "of its tokens" in " ".join(page.read_text().split())
    assert len(page.read_text().splitlines()) <= README_LINES_MAX


def test_without_results_no_figure_is_told(tmp_path: Path) -> None:
    assert figures(tmp_path / "none.json") == ""


def test_figures_written_again_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "results.json", tmp_path / "README.md"
    headline_results().save(results)
    page.write_text(README.read_text())
    arguments = ["--results", str(results)]
    assert main([*arguments, "--write", str(page)]) == 0
    once = page.read_text()
    assert main([*arguments, "--write", str(page)]) == 0
    assert page.read_text() == once != README.read_text()
    assert main(arguments) == 0
    assert capsys.readouterr().out in once
