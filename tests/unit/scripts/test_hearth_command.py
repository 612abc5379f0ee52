"""The command `hearth` is checked here: what it lists, what it imports, what it ends with."""

import importlib
import os
from pathlib import Path
from typing import NoReturn

import pytest

from hearth.commands import check, main as hearth, serve
from hearth.shared.errors import StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.version import VERSION

STARTED_BY_COMMANDS = "server.serve_until_stdin_ends"
WRITES_README = "bench.headline"


@pytest.mark.parametrize("name", hearth.COMMANDS)
def test_every_command_shows_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hearth.main([name, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert shown.startswith(f"usage: hearth {name} [-h]") and f"    hearth {name}" in shown


def test_every_command_module_that_can_be_run_is_listed() -> None:
    folder = PROJECT_DIR / "scripts" / "commands"
    runnable = {
        path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        for path in folder.rglob("*.py")
        if "__main__" in path.read_text()
    }
    listed = {command.module for command in hearth.COMMANDS.values()}
    assert runnable == {"main", STARTED_BY_COMMANDS, WRITES_README, *listed}
    for command in hearth.COMMANDS.values():
        assert callable(importlib.import_module(f"hearth.commands.{command.module}").main)


@pytest.mark.parametrize("arguments", [[], ["server"], ["--verbose", "why"]])
def test_what_is_no_command_is_refused_by_the_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hearth.main(arguments)
    assert end.value.code == 2


@pytest.mark.parametrize("name", hearth.DROPPED)
def test_a_command_that_went_is_told_with_what_stands_in_its_place(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        hearth.main([name, "--once"])
    assert (end.value.code, name in hearth.COMMANDS) == (2, False)
    assert hearth.DROPPED[name] in capsys.readouterr().err


class Served(Exception):
    """Stands for the server that this process became."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`hearth serve` up to the point where it becomes the server."""
    from hearth.proxy import main as proxy

    def become() -> NoReturn:
        raise Served(Path.cwd())

    monkeypatch.setattr(proxy, "main", become)
    monkeypatch.setattr(serve, "take_port", lambda *given, is_check: f"{given[1]} is free")
    model = tmp_path / "small"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    given = {"MODEL_PATH": str(model), "WORKERS": "1", "PROXY_PORT": "1"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)  # so that it is put back
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_serve_takes_its_options_for_settings_and_runs_in_the_project_directory(
    started: Path,
) -> None:
    (started / "model").mkdir()
    with pytest.raises(Served) as served:
        serve.main(["--model", "model", "--workers", "2", "--port", "4321"])
    assert served.value.args == (PROJECT_DIR,)
    names = ("MODEL_PATH", "WORKERS", "PROXY_PORT")
    assert [os.environ[name] for name in names] == [str(started / "model"), "2", "4321"]


def test_serve_ends_with_78_for_a_bad_setting_and_1_for_a_port_that_is_held(
    started: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--port", "99999"]) == 78
    assert capsys.readouterr().err.startswith("PROXY_PORT is '99999'; allowed is a whole number")

    def held(*given: object, is_check: bool) -> NoReturn:
        raise StartError("Port 4321 is held by pid 1 (init).")

    monkeypatch.setattr(serve, "take_port", held)
    for command in (serve.main, check.main):
        assert command(["--port", "4321"]) == 1
        assert capsys.readouterr().err == "Port 4321 is held by pid 1 (init).\n"


def test_check_says_what_it_found(started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--model", "small", "--workers", "3", "--port", "4321"]) == 0
    shown = capsys.readouterr().out
    model = f"{started / 'small'}, workers 3"
    for expected in (f"Hearth    {VERSION}", model, "4321 is free", "Images"):
        assert expected in shown
