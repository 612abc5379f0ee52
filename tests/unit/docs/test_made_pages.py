"""Pages that are made: whom memories serve, the architectures, and the figures of the README."""

from pathlib import Path

import pytest

from hearth.commands.bench.headline import RESULTS, headline
from hearth.commands.bench.results import Results
from scripts.docs import architectures_table, memories_table


def test_every_memory_says_whom_it_serves() -> None:
    rows = {path: memories_table.untold(text) for path, text in memories_table.sources()}
    assert {path: lines for path, lines in rows.items() if lines} == {}
    assert len(memories_table.told()) > 30


@pytest.mark.parametrize(
    "made",
    [
        "self.a = OrderedDict()",
        "self.a: deque[int] = deque(maxlen=3)",
        "self.a = MemoryByOwner[str, int](3)",
        "self.a: dict[str, deque[int]] = {name: collections.deque() for name in names}",
        "@functools.lru_cache(maxsize=4)\ndef f() -> None: ...",
        "@cache\ndef f() -> None: ...",
    ],
)
def test_a_memory_that_says_nothing_would_be_seen(made: str) -> None:
    assert memories_table.untold(f"\n\n\n{made}\n") == [4]
    assert memories_table.untold(f"# Kept for one key: words\n{made}\n") == []
    assert memories_table.untold(f"# Kept for whoever: words\n{made}\n") == [2]


def test_the_threat_model_has_the_table_of_what_they_say() -> None:
    text = memories_table.PAGE.read_text()
    remedy = "run .venv/bin/python -m scripts.docs.memories_table"
    assert text == memories_table.with_table(text), remedy


def test_the_page_of_models_has_the_table_of_the_recorded_architectures() -> None:
    text = architectures_table.PAGE.read_text()
    remedy = "run .venv/bin/python -m scripts.docs.architectures_table"
    assert text == architectures_table.with_table(text), remedy


ROOT = Path(__file__).parents[3]


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    told = headline(Results.load(ROOT / RESULTS))
    remedy = "put in what .venv/bin/python -m hearth.commands.bench.headline prints"
    assert f"\n{told}\n" in (ROOT / "README.md").read_text(), remedy
