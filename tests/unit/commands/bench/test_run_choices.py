"""Models and workloads of a run are chosen, and the file that it goes on with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.bench.results import ModelFacts, Results
from hearth.commands.bench.rounds import command
from hearth.commands.bench.rounds.all_workloads import ALL_WORKLOADS, chosen_workloads
from hearth.commands.bench.rounds.model_facts import BenchModel, chosen_models
from hearth.commands.bench.rounds.visit_rounds import Course
from hearth.commands.bench.servers.known_servers import SERVERS
from hearth.commands.bench.workload import SCALES, Start
from hearth.shared.errors import StartError
from hearth.shared.models.builtin_models import MODELS_DIR_VARIABLE, SMOLLM2

# ---------------------------------------------------------------- models


def write_model(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (directory / "model.safetensors").write_bytes(b"0" * 100)
    return directory


def test_a_directory_is_told_by_its_name_and_its_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "Qwen-7B-4bit", quantization={"bits": 4, "group_size": 64})
    (model,) = chosen_models([str(path)])
    assert model.facts == ModelFacts("Qwen-7B-4bit", "text", "qwen3", 100, 4)
    assert model.directory == path


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / place / "tiny") for place in ("a", "b")]
    with pytest.raises(StartError, match="Two models are called tiny"):
        chosen_models([str(path) for path in paths])
    assert len(chosen_models([str(paths[0])] * 2)) == 1


@pytest.mark.parametrize(
    ("arguments", "model", "scale"),
    [
        ([], "smollm2", "quick"),
        (["--scale", "full"], "smollm2", "full"),
        (["--model", "smollm2"], "smollm2", "full"),
        (["--model", "{}"], "tiny", "full"),
    ],
)
def test_without_a_model_the_first_one_is_measured_quickly(
    arguments: list[str],
    model: str,
    scale: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MODELS_DIR_VARIABLE, str(tmp_path))
    write_model(SMOLLM2.directory)
    path = write_model(tmp_path / "tiny")
    options = command.options_of([each.format(path) for each in arguments])
    course = command._course(options, SCALES)
    assert [each.facts.label for each in course.models] == [model]
    assert course.scale.name == scale


@pytest.mark.parametrize("text", ["[]", "{", '"qwen3"'])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    path = write_model(tmp_path / "tiny")
    (path / "config.json").write_text(text)
    with pytest.raises(StartError, match=r"config\.json"):
        chosen_models([str(path)])


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(StartError, match="no-such-model"):
        chosen_models(["no-such-model"])


# ---------------------------------------------------------------- workloads


def test_workloads_have_names_of_their_own_and_say_what_they_do() -> None:
    names = [workload.name for workload in ALL_WORKLOADS]
    assert len(set(names)) == len(names) >= 20
    assert all(workload.about.endswith(".") for workload in ALL_WORKLOADS)
    assert {workload.start for workload in ALL_WORKLOADS} == set(Start)


def test_what_is_asked_again_brings_what_read_it() -> None:
    chosen = [workload.name for workload in chosen_workloads(["kill", "restart"], is_quick=True)]
    assert chosen == ["answers", "restart", "before-kill", "kill"]


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(StartError, match="No workload is called nothing; there are linear"):
        chosen_workloads(["nothing"], is_quick=False)


def test_a_quick_run_plays_fewer_workloads() -> None:
    assert set(chosen_workloads([], is_quick=True)) <= set(chosen_workloads([], is_quick=False))


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


def test_another_model_or_server_of_the_same_name_is_told(tmp_path: Path) -> None:
    path, found = tmp_path / "a.json", begun(tmp_path / "none.json")
    found.models["tiny"] = replace(FACTS, bytes=7)
    found.servers["hearth"] = replace(found.servers["hearth"], version="0.1")
    found.save(path)
    with pytest.raises(StartError, match=r"tiny was ModelFacts\(.*; hearth was 0\.1"):
        begun(path)


def test_the_page_never_replaces_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--json", "a.html"], ["--html", "a.json", "--page", "a.json"]):
        with pytest.raises(SystemExit):
            command.options_of(words)
    assert "would replace a.html" in capsys.readouterr().err
