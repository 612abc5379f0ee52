"""The command `hearth bench` runs whole on two real servers: plan, rounds, files, and going on."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.commands.bench.results import Results
from hearth.commands.bench.rounds import command, machine_facts
from hearth.commands.bench.workload import Scale
from scripts.fixtures.fixture_cache import fixture_dir

SCALES = {"smallest": Scale("smallest", 40, 2, 60, 200, 60, 8, 1)}
WORKLOADS = "linear,answers-cold,restart,kill"
# What the command plays for them: what is asked again was read before.
PLAYED = ["linear", "answers", "restart", "before-kill", "kill", "answers-cold"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return where the command writes; other tests' servers may compute beside it."""
    patcher = pytest.MonkeyPatch()
    patcher.setattr(command, "computing_servers", lambda: [])
    patcher.setattr(command, "has_other_runs", lambda path: False)
    yield tmp_path_factory.mktemp("bench")
    patcher.undo()


def bench(place: Path, *more: str) -> int:
    given = ["--model", str(fixture_dir("qwen3", tiny=True)), "--servers", "hearth,mlx_lm"]
    given += ["--scale", "smallest", "--workloads", WORKLOADS, "--json", str(place / "a.json")]
    return command.main([*given, *more], SCALES)


@pytest.fixture(scope="module")
def made(place: Path) -> Results:
    assert bench(place, "--yes") == 0
    return Results.load(place / "a.json")


def test_every_workload_is_measured_on_both_servers(made: Results) -> None:
    assert list(made.servers) == ["hearth", "mlx_lm"]
    assert all(facts.is_metered and facts.version for facts in made.servers.values())
    told = [(each.server, each.workload) for each in made.samples]
    assert told == [(server, name) for server in made.servers for name in PLAYED]
    assert [each.errors for each in made.samples] == [()] * len(told)
    for each in made.samples:
        assert each.values["failed"] == 0 and each.values["requests"] >= 1


def test_a_restart_and_a_crash_cost_hearth_less_than_the_prompt(made: Results) -> None:
    """What the other keeps in memory alone is gone; what Hearth wrote is not."""
    for name in ("restart", "kill"):
        (own,) = made.of(next(iter(made.models)), "hearth", name)
        (other,) = made.of(next(iter(made.models)), "mlx_lm", name)
        assert own.values["read_tokens"] < 0.5 * own.values["prompt_tokens"]
        assert other.values["read_tokens"] > 0.9 * other.values["prompt_tokens"]


def test_what_is_shared_names_no_place_user_or_prompt(place: Path, made: Results) -> None:
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
    shown = capsys.readouterr()
    assert "0 visits (2 are in the file already)" in shown.out and "Begin?" not in shown.out
    assert Results.load(place / "a.json").samples == made.samples


def test_a_file_of_another_version_is_left_alone(
    place: Path, made: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((place / "a.json").read_text()) | {"version": "0.0.1"}
    (place / "old.json").write_text(json.dumps(told))
    before = (place / "old.json").read_bytes()
    assert bench(place, "--json", str(place / "old.json"), "--yes") == command.CANNOT_BEGIN
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
    none, count = capsys.readouterr().out.splitlines()
    assert none == "No line moved by more than its spread."
    assert count.startswith("0 of ") and "If nothing had changed, up to " in count


def test_a_computing_hearth_is_told_before_anything_begins(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "computing_servers", lambda: [4321])
    assert bench(place, "--json", str(place / "busy.json")) == command.CANNOT_BEGIN
    assert "computes on this machine (pid 4321)" in capsys.readouterr().err
    assert not (place / "busy.json").exists()


def test_this_process_is_no_server() -> None:
    assert os.getpid() not in machine_facts.computing_servers()
