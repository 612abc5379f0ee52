"""`hearth service` is run against fake managers, which start real processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.commands.service import command, launchd
from hearth.shared.processes import PID_FILE, process_started
from tests.helpers.services.service_home import ServiceHome

pytestmark = pytest.mark.process


@pytest.fixture(params=["darwin", "linux"])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceHome]:
    made = ServiceHome(tmp_path, request.param, monkeypatch)
    yield made
    if made.manager.process is not None:
        made.manager.process.kill()
        made.manager.process.wait()


def test_a_whole_life_leaves_nothing(
    home: ServiceHome, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "why_missing", lambda source: f"{source} is missing.")
    before = home.files()
    assert (home.run("status"), home.run("start")) == (4, 1)
    assert home.run("install") == 0
    first, shown = home.pid, capsys.readouterr().out
    assert f"running (pid {first}), http://127.0.0.1:{home.port}" in shown
    assert "Model     builtin:smollm2 is missing.\n" in shown
    assert home.unit.stat().st_mode & 0o777 == 0o600
    assert (home.home / "starts").read_text() == f"{home.home / '.hearth'}\n"

    assert home.run("install") == 0
    second = home.pid
    assert second not in (None, first) and process_started(first or 0) is None
    assert capsys.readouterr().out.startswith("Upgraded ")

    assert (home.run("start"), home.pid) == (0, second)  # it runs already
    assert (home.run("stop"), home.pid) == (0, None)
    assert (home.run("stop"), home.run("status")) == (0, 3)
    assert (home.run("start"), home.run("status")) == (0, 0)
    assert f"Address   http://127.0.0.1:{home.port}\nModel  " in capsys.readouterr().out

    assert (home.run("uninstall"), home.pid) == (0, None)
    assert home.files() - before == {"starts"}
    assert home.run("uninstall") == 0


def test_a_server_that_cannot_start_says_why(
    home: ServiceHome, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.home / "refuses").touch()
    assert home.run("install") == 1
    said = capsys.readouterr().err
    assert "did not start: exit status 78" in said and "MODEL_PATH is refused." in said
    assert home.run("status") == 3
    assert "Last exit exit status 78" in capsys.readouterr().out


def test_a_server_that_was_started_by_hand_is_left_alone(
    home: ServiceHome, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as by_hand:
        row = {"pid": by_hand.pid, "started": process_started(by_hand.pid)}
        home.run_dir.mkdir(parents=True)
        (home.run_dir / PID_FILE).write_text(json.dumps({"supervisor": row, "children": []}))
        assert home.run("install") == 1
        assert f"(pid {by_hand.pid}). Stop it with: kill {by_hand.pid}" in capsys.readouterr().err
        assert by_hand.poll() is None and not home.unit.exists() and home.manager.process is None


@pytest.mark.parametrize("home", ["darwin"], indirect=True)
def test_an_agent_that_does_not_end_keeps_its_file(
    home: ServiceHome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert home.run("install") == 0
    home.manager.errors["bootout"] = "Boot-out failed: 1: Operation not permitted"
    monkeypatch.setattr(launchd, "UNLOAD_WAIT_S", 0.1)
    assert home.run("uninstall") == 1
    said = capsys.readouterr().err
    assert "It does not end: Boot-out failed: 1: Operation not permitted. Log out and in." in said
    assert home.unit.exists() and home.pid is not None


@pytest.mark.parametrize(
    ("home", "verb", "remedy"),
    [
        ("darwin", "bootstrap", "without sudo"),
        ("linux", "restart", "systemctl --user status"),
        ("linux", "show-environment", f"loginctl enable-linger {os.getuid()}"),
    ],
    indirect=["home"],
)
def test_a_service_that_its_manager_refuses_leaves_nothing(
    home: ServiceHome, verb: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home.manager.errors[verb] = "Job failed"
    assert home.run("install") == 1
    said = capsys.readouterr().err
    assert "ended with status 1: Job failed. " in said and remedy in said
    assert not home.unit.exists() and home.manager.process is None


@pytest.mark.parametrize(
    ("system", "user", "said"),
    [("linux", "me", "without sudo"), ("win32", "", "win32 has neither launchd nor systemd")],
)
def test_what_can_have_no_service_is_refused(
    system: str,
    user: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SUDO_USER", user)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert command.main(["install"], system, Path("/nowhere/.env")) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "status"), [(["--end-with-0-if-refused"], 0), ([], 78)])
def test_a_refused_start_ends_as_its_manager_understands(
    flags: list[str], status: int, tmp_path: Path
) -> None:
    log = tmp_path / ".hearth" / "logs" / "service.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * 10_000_001)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hearth.commands.main", "service", "run", *flags],
        env={**os.environ, "HOME": str(tmp_path), "PROXY_PORT": "99999"},
        cwd=tmp_path,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")
    assert log.read_text().startswith("PROXY_PORT is '99999'")
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.with_name("service.log.1").stat().st_size == 10_000_000
    assert (tmp_path / ".hearth" / "service.refused").exists() == (status == 0)
