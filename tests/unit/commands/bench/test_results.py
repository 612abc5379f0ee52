"""The results file keeps what was measured, through interruptions."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.results import Results
from tests.helpers.bench.flat_results import empty_results

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.dictionaries(st.sampled_from(sorted(MEASURES)), st.floats(0, 1e9), max_size=4)
ROUND = st.tuples(
    st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from("ef")),
    st.integers(0, 3),
    VALUES,
    st.lists(WORDS, max_size=2),
    st.lists(WORDS, max_size=2),
)


@given(st.lists(ROUND, max_size=8))
def test_what_is_put_is_there_the_last_of_each_round_and_comes_back_from_the_file(
    rounds: list[tuple[tuple[str, str, str], int, dict[str, float], list[str], list[str]]],
) -> None:
    results = empty_results()
    for each in rounds:
        results.put(*each)
    last = {(place, number): each for place, number, *each in rounds}
    for (place, number), (values, digests, errors) in last.items():
        cell = results.cell(*place)
        at = cell.rounds.index(number)
        found = {name: column[at] for name, column in cell.values.items()}
        assert {name: each for name, each in found.items() if each is not None} == values
        assert cell.digests.get(str(number), []) == digests
        assert cell.errors.get(str(number), []) == errors
        assert all(len(column) == len(cell.rounds) for column in cell.values.values())
    assert sum(len(results.cell(*place).rounds) for place in results.places()) == len(last)
    with TemporaryDirectory() as directory:
        results.save(Path(directory, "a.json"))
        assert Results.load(Path(directory, "a.json")) == results
        assert [path.name for path in Path(directory).iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1, "samples": []}', '{"format": 2}', '{"format": 2, "models": 3}'],
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is no file of `hearth bench`"):
        Results.load(tmp_path / "a.json")


def test_a_file_of_another_format_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(ValueError, match="it has format 1, this version reads 2"):
        Results.load(tmp_path / "a.json")


def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = empty_results()
    results.save(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()

    def full(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        results.save(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == before
