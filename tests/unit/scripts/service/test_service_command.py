"""`hearth service` is run against fake managers, which start real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hearth.commands.service import command, launchd
from hearth.commands.service.service_manager import log_file
from hearth.shared.processes import PID_FILE, process_started
from tests.helpers.services.service_desk import Desk

pytestmark = pytest.mark.process

WAIT_S_MAX = 60.0


def test_a_whole_life_leaves_nothing(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "why_missing", lambda source: f"{source} is missing.")
    before = desk.files()
    assert desk.run("status") == 4
    assert desk.run("install") == 0
    first, shown = desk.pid, capsys.readouterr().out
    assert f"running (pid {first}), http://127.0.0.1:{desk.port}" in shown
    assert "Model     builtin:smollm2 is missing.\n" in shown
    assert desk.unit.stat().st_mode & 0o777 == 0o600
    where = (desk.home / "starts").read_text().split(" ", 1)[1]
    assert where == f"{desk.home / '.hearth'}\n"

    desk.add_setting("LOG_LEVEL=debug")
    assert desk.run("install") == 0
    second = desk.pid
    assert second not in (None, first) and process_started(first or 0) is None
    assert capsys.readouterr().out.startswith("Upgraded ") and "30" in desk.unit.read_text()

    assert (desk.run("start"), desk.pid) == (0, second)  # it runs already
    assert (desk.run("stop"), desk.pid) == (0, None)
    assert (desk.run("stop"), desk.run("status")) == (0, 3)
    assert (desk.run("start"), desk.run("status")) == (0, 0)
    shown = capsys.readouterr().out
    assert f"Address   http://127.0.0.1:{desk.port}\nModel     builtin:smollm2 is" in shown

    assert (desk.run("uninstall"), desk.pid, desk.jobs) == (0, None, [])
    assert desk.files() - before == {"starts"}
    assert (desk.run("uninstall"), desk.run("status")) == (0, 4)


def test_a_server_that_fails_is_started_again(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.run("install") == 0
    first = desk.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S_MAX
    while desk.pid in (None, first) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert desk.pid not in (None, first)
    assert desk.run("status") == 0
    assert re.search(r"Last exit (exit status -9|a failure, for the 1)", capsys.readouterr().out)


def test_a_server_that_cannot_start_is_not_started_again_and_says_why(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk.home / "refuses").touch()
    assert desk.run("install") == 1
    said = capsys.readouterr().err
    assert "did not start: exit status 78" in said and "MODEL_PATH is refused." in said
    assert desk.run("status") == 3
    assert "Last exit exit status 78" in capsys.readouterr().out
    assert len((desk.home / "starts").read_text().splitlines()) == 1


def test_a_failed_start_is_told_whatever_is_in_its_log(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk.home / "refuses").touch()
    log_file().parent.mkdir()
    log_file().write_bytes(b"a library says \xff\n")
    assert desk.run("install") == 1
    assert "MODEL_PATH is refused." in capsys.readouterr().err
    monkeypatch.setattr(command, "log_file", lambda: desk.home / "none")
    assert desk.run("install") == 1
    assert "did not start" in (said := capsys.readouterr().err) and "No such file" in said


def test_a_server_that_was_started_by_hand_is_left_alone(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        row = {"pid": by_hand.pid, "started": process_started(by_hand.pid)}
        desk.run_dir.mkdir(parents=True)
        (desk.run_dir / PID_FILE).write_text(json.dumps({"supervisor": row, "children": []}))
        assert desk.run("install") == 1
        said = capsys.readouterr().err
        assert f"(pid {by_hand.pid}). Stop it with: kill {by_hand.pid}" in said
        assert by_hand.poll() is None and not desk.unit.exists() and desk.jobs == []
    finally:
        by_hand.kill()
        by_hand.wait()


def test_an_agent_that_does_not_end_keeps_its_file(
    mac: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mac.run("install") == 0
    stuck = mac.directory / "manager" / "stuck"
    stuck.write_text("yes")
    monkeypatch.setattr(launchd, "UNLOAD_WAIT_S", 0.1)
    assert mac.run("uninstall") == 1
    said = capsys.readouterr().err
    assert "It does not end: Boot-out failed: 1: Operation not permitted. Log out and in." in said
    assert mac.unit.exists() and mac.pid is not None
    stuck.unlink()


def test_an_agent_that_was_disabled_is_enabled(mac: Desk) -> None:
    (mac.directory / "manager" / "disabled").write_text("local.hearth.server")
    assert mac.run("install") == 0


def test_an_agent_that_launchd_refuses_leaves_no_file(
    mac: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    mac.set_domains()
    assert mac.run("install") == 1
    said = capsys.readouterr().err
    assert "ended with status 112" in said and "without sudo" in said
    assert not mac.unit.exists()


def test_a_unit_that_systemd_cannot_start_leaves_nothing(
    linux: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    (linux.directory / "manager" / "fails").write_text("yes")
    assert linux.run("install") == 1
    assert "Job for hearth.service failed." in capsys.readouterr().err
    assert not linux.unit.exists() and linux.jobs == []
    assert not linux.unit.parent.joinpath("default.target.wants").exists()


def test_without_systemd_of_the_user_nothing_is_written(
    linux: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    linux.set_domains()
    assert linux.run("install") == 1
    said = capsys.readouterr().err
    assert "No medium found" in said and f"loginctl enable-linger {os.getuid()}" in said
    assert not linux.unit.exists()


def test_a_machine_without_the_tool_is_told(
    linux: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(linux.home))
    assert linux.run("install") == 1
    assert "No such file or directory: 'systemctl'. Start `hearth serve`" in capsys.readouterr().err


def test_logs_become_tail_of_the_log(
    linux: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: became.append(words))
    assert linux.run("logs") == 1
    assert "There is no log at" in capsys.readouterr().err and not became
    log_file().parent.mkdir(parents=True)
    log_file().touch()
    linux.run("logs", "-n", "3", "-f")
    assert became == [["tail", "-n", "3", "-F", str(log_file())]]


@pytest.mark.parametrize(
    ("system", "environ", "said"),
    [
        ("linux", {"SUDO_USER": "me"}, "without sudo"),
        ("win32", {}, "win32 has neither launchd nor systemd"),
    ],
)
def test_what_can_have_no_service_is_refused(
    system: str,
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert command.main(["install"], system, Path("/nowhere/.env")) == 1
    assert said in capsys.readouterr().err


def test_a_worker_and_a_rank_are_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["install", "worker", "tcp://0.0.0.0:5555"])
    assert end.value.code == 2
    assert "`hearth serve` alone, and no worker or rank" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "status"), [(["--end-with-0-if-refused"], 0), ([], 78)])
def test_a_unit_of_an_earlier_versions_worker_is_not_started_again(
    flags: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["run", *flags, "worker", "tcp://0.0.0.0:5555", "--model", "x"])
    assert end.value.code == status
    assert "no worker tcp://0.0.0.0:5555 --model x: a service is" in capsys.readouterr().err


def test_a_start_without_an_install_is_refused(
    linux: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert linux.run("start") == 1
    assert "Install it: hearth service install" in capsys.readouterr().err


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
