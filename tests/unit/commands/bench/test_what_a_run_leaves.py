"""A run of the bench goes in rounds, and leaves a file to go on with, a page, and a sentence."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.headline import KILLED, LINE_CHARS, SUB_AGENTS, headline
from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.page import bench_page
from hearth.commands.bench.results import HEARTH, ModelFacts, Results
from hearth.commands.bench.rounds import command
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.visit_rounds import Course
from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.workload import SCALES
from hearth.shared.errors import StartError
from tests.helpers.bench.flat_results import MODELS, empty_results, flat_results, headline_results

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ROUND = st.tuples(
    st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from("ef")),
    st.integers(0, 3),
    st.dictionaries(st.sampled_from(sorted(MEASURES)), st.floats(0, 1e9), max_size=4),
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


# ---------------------------------------------------------------- in rounds


def visits(*servers: str, rounds: int) -> list[tuple[str, int]]:
    model = BenchModel(ModelFacts("tiny", "text", "qwen3", 1_000), Path("/home/some/tiny"))
    course = Course([model], [Server(name) for name in servers], [], SCALES["quick"], rounds)
    return [(visit.server.name, visit.round) for visit in course.visits()]


def test_another_server_begins_each_round_and_every_other_round_goes_backwards() -> None:
    names = [name for name, _ in visits("hearth", "b", "c", rounds=3)]
    assert names == ["hearth", "b", "c", "b", "hearth", "c", "c", "hearth", "b"]


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_server_has_one_visit_in_each_round(servers: int, rounds: int) -> None:
    found = visits(*(f"s{number}" for number in range(servers)), rounds=rounds)
    assert len(found) == len(set(found)) == servers * rounds
    assert [number for _, number in found] == sorted(number for _, number in found)


# ---------------------------------------------------------------- going on

COURSE = Course(
    [BenchModel(ModelFacts("tiny", "text", "qwen3", 100), Path("/m"))],
    [SERVERS["hearth"]],
    [],
    SCALES["quick"],
    2,
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "machine_text", lambda: "a machine")
    monkeypatch.setattr(command, "commit", lambda: "c")


def begun(path: Path, course: Course = COURSE) -> Results:
    return command._begun(command.options_of(["--json", str(path)]), course)


def test_a_run_goes_on_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    begun(path).save(path)
    changed = replace(Results.load(path), began="then")
    changed.put(("tiny", "hearth", "w"), 0, {"read_tokens": 1.0})
    changed.save(path)
    found = begun(path, replace(COURSE, rounds=5))
    assert (found.began, found.rounds, found.cells) == ("then", 5, changed.cells)
    assert found.command == "hearth bench --model tiny --servers hearth --scale quick --rounds 5"


@pytest.mark.parametrize("name", ["version", "commit", "scale", "machine"])
def test_a_file_of_another_run_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.json"
    replace(begun(path), **{name: "another"}).save(path)  # type: ignore[arg-type]
    with pytest.raises(StartError, match=f"of another run: {name} was another"):
        begun(path)


EVIL = "<script>alert(1)</script>"


def test_what_a_stranger_writes_is_text() -> None:
    results = flat_results({(EVIL, EVIL, EVIL): [{"cpu_s": 1.0}]})
    results.machine = results.command = results.version = EVIL
    results.put((EVIL, EVIL, EVIL), 1, {}, errors=[EVIL])
    page = bench_page(results, {(EVIL, "cpu_s"): EVIL}, {EVIL: EVIL})
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def told(results: Results) -> str:
    assert max(map(len, headline(results).splitlines())) <= LINE_CHARS
    return " ".join(headline(results).split())


def changed(results: Results, server: str, **values: float) -> Results:
    """Return the results with `values` in all rounds of a server."""
    for model, name, workload in list(results.places()):
        if name == server:
            cell = results.cell(model, name, workload)
            cell.values |= {measure: [value] * 5 for measure, value in values.items()}
    return results


def test_the_sentence_tells_hearth_and_the_best_other_from_the_best_to_the_worst_model() -> None:
    text = told(headline_results())
    assert text.startswith(
        "On four tiny models, in sessions with sub-agents, Hearth read **1.00 to"
    )
    assert "for each model read 1.50 to 1.53 times. After `kill -9`" in text
    assert "**11.1 to 11.4 %** of the last prompt again" in text


def test_a_server_whose_requests_failed_is_not_the_best() -> None:
    assert "read 2.00 to 2.03 times" in told(changed(headline_results(), "other-0", failed=1.0))


def test_a_server_that_nobody_counted_is_not_the_best() -> None:
    results = headline_results()
    results.servers["other-0"] = replace(results.servers["other-0"], is_metered=False)
    assert "read 2.00 to 2.03 times" in told(results)


def test_the_best_other_is_chosen_for_each_model_anew() -> None:
    results = headline_results(others=2)
    del results.cells[MODELS[0]]["other-0"]
    assert "read 1.51 to 2.00 times" in told(results)


@pytest.mark.parametrize("workload", [*SUB_AGENTS, *KILLED])
def test_a_figure_that_was_not_measured_is_not_made_up(workload: str) -> None:
    results = headline_results()
    del results.cells[MODELS[0]][HEARTH][workload]
    with pytest.raises(ValueError, match="no count"):
        headline(results)


def test_hearths_own_failures_are_not_hidden_in_a_figure() -> None:
    with pytest.raises(ValueError, match="no count"):
        headline(changed(headline_results(), HEARTH, failed=1.0))
