"""The results file keeps what was measured, through interruptions."""

from pathlib import Path
from tempfile import TemporaryDirectory

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
