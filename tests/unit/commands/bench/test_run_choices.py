"""Models and workloads of a run are chosen, and the file that it goes on with."""

from dataclasses import replace
from pathlib import Path

import pytest

from hearth.commands.bench.results import ModelFacts, Results
from hearth.commands.bench.rounds import command
from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.rounds.visit_rounds import Course
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.workload import SCALES
from hearth.shared.errors import StartError

# ---------------------------------------------------------------- going on

FACTS = ModelFacts("tiny", "text", "qwen3", 100)
COURSE = Course([BenchModel(FACTS, Path("/m"))], [SERVERS["hearth"]], [], SCALES["quick"], 2)


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
