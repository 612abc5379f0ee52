"""The command `hearth bench` runs whole on two real servers: plan, rounds, files, and going on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hearth.commands.bench.results import Results
from hearth.commands.bench.rounds import command
from hearth.commands.bench.statistics import read_over
from hearth.commands.bench.workload import Scale
from scripts.fixtures.fixture_cache import fixture_dir

SCALES = {"smallest": Scale("smallest", 40, 2, 60, 200, 60, 8, 1)}
WORKLOADS = "linear,answers-cold,restart,kill"
# What the command plays for them: what is asked again was read before.
PLAYED = ["linear", "answers", "restart", "before-kill", "kill", "answers-cold"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def bench(place: Path, *more: str) -> int:
    given = ["--model", str(fixture_dir("qwen3", tiny=True)), "--servers", "hearth,mlx_lm"]
    given += ["--scale", "smallest", "--workloads", WORKLOADS, "--json", str(place / "a.json")]
    return command.main([*given, *more], SCALES)


@pytest.fixture(scope="module")
def made(place: Path) -> Results:
    assert bench(place) == 0
    return Results.load(place / "a.json")


def test_every_workload_is_measured_on_both_servers(made: Results) -> None:
    assert list(made.servers) == ["hearth", "mlx_lm"]
    assert all(facts.is_metered and facts.version for facts in made.servers.values())
    (model,) = made.models
    assert list(made.places()) == [(model, name, each) for name in made.servers for each in PLAYED]
    for place in made.places():
        cell = made.cell(*place)
        assert cell.errors == {} and cell.rounds == [0]
        assert cell.numbers("failed") == [0] and cell.numbers("requests")[0] >= 1


def test_a_restart_and_a_crash_cost_hearth_less_than_the_prompt(made: Results) -> None:
    """What the other keeps in memory alone is gone; what Hearth wrote is not."""
    (model,) = made.models
    for workload in ("restart", "kill"):
        own = read_over(made, model, "hearth", (workload,), "prompt_tokens")
        other = read_over(made, model, "mlx_lm", (workload,), "prompt_tokens")
        assert own is not None and other is not None and own < 0.5 < 0.9 < other


def test_what_is_shared_names_no_place_of_the_user(place: Path, made: Results) -> None:
    for file in ("a.json", "a.html"):
        text = (place / file).read_text()
        assert str(Path.home()) not in text and str(place) not in text
        assert not re.search(r"/(root|home|Users|tmp|private)/", text)
    assert made.command.startswith("hearth bench --model qwen3-tiny")
    assert "<html" in (place / "a.html").read_text()


def test_what_is_there_is_not_measured_again(
    place: Path, made: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(place) == 0
    assert "0 of 2 visits are left to be played." in capsys.readouterr().out
    assert Results.load(place / "a.json").cells == made.cells


def test_a_file_of_another_version_is_left_alone(
    place: Path, made: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((place / "a.json").read_text()) | {"version": "0.0.1"}
    (place / "old.json").write_text(json.dumps(told))
    before = (place / "old.json").read_bytes()
    assert bench(place, "--json", str(place / "old.json")) == command.CANNOT_BEGIN
    assert "version was 0.0.1" in capsys.readouterr().err
    assert (place / "old.json").read_bytes() == before


def test_the_page_is_made_anew_from_its_json(place: Path, made: Results) -> None:
    first = (place / "a.html").read_text()
    (place / "a.html").unlink()
    assert command.main(["--page", str(place / "a.json")]) == 0
    assert (place / "a.html").read_text() == first


def test_a_run_beside_itself_moved_nowhere(
    place: Path, made: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--compare", str(place / "a.json"), str(place / "a.json")]) == 0
    assert capsys.readouterr().out.startswith("0 of ")


def test_a_run_that_is_told_to_end_ends_its_server(place: Path, made: Results) -> None:
    words = ["-m", "hearth.commands.main", "bench", "--servers", "hearth", "--rounds", "1"]
    words += ["--model", str(fixture_dir("qwen3", tiny=True)), "--json", str(place / "ended.json")]
    running = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None and "linear, round 1 of 1" in running.stderr.readline()
    started = psutil.Process(running.pid).children(recursive=True)
    assert started
    running.terminate()
    assert "The same command goes on where it was." in running.communicate(timeout=90)[1]
    assert running.returncode == command.INTERRUPTED
    assert psutil.wait_procs(started, timeout=10)[1] == []
