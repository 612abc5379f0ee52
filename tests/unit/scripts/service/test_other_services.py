"""Services beside the server's: a worker for other machines, a part of a model over ranks."""

import os
import plistlib
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.commands import main as hearth
from hearth.commands.service import command
from hearth.commands.service.launchd import Launchd, plist_of
from hearth.commands.service.service_kinds import WORKER
from hearth.commands.service.service_plan import ServiceHost, plan_of
from hearth.commands.service.systemd import Systemd
from tests.helpers.servers.server import free_port
from tests.helpers.services.service_desk import Desk

pytestmark = pytest.mark.process


def shown(desk: Desk, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command that succeeds prints."""
    capsys.readouterr()
    assert desk.run(*arguments) == 0
    return capsys.readouterr().out


def test_a_worker_is_a_service_beside_the_server_and_neither_touches_the_other(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.make_keys()
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    told = shown(desk, capsys, "install", "worker", endpoint)
    worker = desk.worker_pid(port)
    assert worker is not None and f"worker: running (pid {worker}), {endpoint}" in told
    assert f"Address   {endpoint}" in shown(desk, capsys, "status"), "it is the only one"

    assert desk.run("install") == 0
    server = desk.pid
    assert server is not None and desk.worker_pid(port) == worker
    assert f"Address   http://127.0.0.1:{desk.port}" in shown(desk, capsys, "status")
    assert "Note" not in shown(desk, capsys, "status", "worker")

    assert desk.run("stop", "worker") == 0
    assert (desk.worker_pid(port), desk.pid) == (None, server)
    assert desk.run("start", "worker") == 0, "its arguments are those of its unit file"
    assert desk.worker_pid(port) not in (None, worker)

    upgraded = shown(desk, capsys, "install", "worker", "--model", "a/%h $x", endpoint)
    assert upgraded.startswith("Upgraded ") and "Note" not in shown(
        desk, capsys, "status", "worker"
    )
    assert desk.run("uninstall") == 0
    assert desk.pid is None and desk.worker_pid(port) is not None
    assert desk.run("uninstall", "worker") == 0
    assert (desk.jobs, desk.worker_pid(port)) == ([], None)


def test_a_worker_that_could_not_start_is_not_installed(
    linux: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    linux.add_setting(f"CURVE_KEYS_DIR={linux.directory / 'none'}")
    assert linux.run("install", "worker", endpoint) == 1
    assert "hearth keys" in capsys.readouterr().err
    linux.make_keys()
    for bad in ("0.0.0.0:5555", "tcp://localhost:5555", "tcp://10.0.0.5", f"tcp://[::1]:{1}"):
        assert linux.run("install", "worker", bad) == 1
        assert "allowed is tcp://ADDRESS:PORT" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        linux.run("install", "worker")
    assert end.value.code == 2 and "ENDPOINT" in capsys.readouterr().err
    assert linux.run("install", "serve", "--port", "1") == 1
    assert "set them there" in capsys.readouterr().err
    assert linux.run("status", "worker") == 4 and linux.jobs == []
    assert "Install it: hearth service install worker\n" in capsys.readouterr().out


def test_a_worker_whose_port_is_taken_is_not_installed(
    linux: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    linux.make_keys()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert linux.run("install", "worker", f"tcp://127.0.0.1:{port}") == 1
    said = capsys.readouterr().err
    assert f"Port {port} is held by pid {os.getpid()}" in said and "run the same command" in said


def test_a_damaged_unit_file_says_to_install_again(
    linux: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    linux.make_keys()
    assert linux.run("install", "worker", f"tcp://127.0.0.1:{free_port()}") == 0
    unit = linux.unit.parent / "hearth-worker.service"
    text = unit.read_text()
    unit.write_text("[Service]\n")
    with pytest.raises(SystemExit):
        linux.run("start", "worker")
    assert "ENDPOINT" in capsys.readouterr().err
    unit.write_text(text)  # so that what runs is ended with the test


@pytest.mark.parametrize(("flags", "status"), [(["--end-with-0-if-refused"], 0), ([], 78)])
def test_ranks_join_is_a_service_that_ends_as_its_manager_understands(
    flags: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    ranks = types.ModuleType("hearth.commands.stand_in")
    ranks.main = lambda arguments: asked.append(list(arguments)) or 78  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hearth.commands.stand_in", ranks)
    monkeypatch.setitem(hearth.COMMANDS, "ranks", hearth.Command("stand_in", "for the test"))
    host = ServiceHost("darwin", tmp_path, 501, {}, tmp_path / ".env")
    assert command.main(["run", *flags, "ranks", "join", "192.168.2.1"], host) == status
    assert asked == [["join", "192.168.2.1"]]
    assert (tmp_path / ".hearth" / "service-ranks.refused").exists() == (status == 0)


def test_ranks_join_is_installed_and_nothing_else_of_ranks(
    mac: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mac.run("install", "ranks", "check") == 1
    assert "`ranks join`" in capsys.readouterr().err
    assert mac.run("install", "ranks", "join", "192.168.2.1") == 1
    assert "hearth keys" in capsys.readouterr().err
    mac.make_keys()
    assert mac.run("install", "ranks", "join", "8.8.8.8") == 1
    assert "8.8.8.8" in capsys.readouterr().err
    assert "ranks: running (pid" in shown(mac, capsys, "install", "ranks", "join", "192.168.2.1")
    assert shown(mac, capsys, "install", "ranks").startswith("Upgraded "), "as it was"
    assert "Address   tcp://192.168.2.1:" in shown(mac, capsys, "status")
    assert mac.run("uninstall") == 0 and mac.jobs == []


def test_a_refused_worker_ends_as_launchd_understands_and_logs_why(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "hearth.commands.main", "service", "run"),
            *("--end-with-0-if-refused", "worker", "tcp://somewhere"),
        ],
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    log = tmp_path / ".hearth" / "logs" / "service-worker.log"
    assert log.read_text().startswith("hearth worker: 'tcp://somewhere' is nowhere to listen")
    assert (tmp_path / ".hearth" / "service-worker.refused").exists()


@given(
    arguments=st.lists(
        st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" ")), max_size=4
    )
)
@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_arguments_come_back_from_a_unit_file_as_they_were(
    system: str, arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.getbasetemp() / "units"
    host = ServiceHost(system, home, 501, {}, home / ".env", ("/bin/python", "run"), WORKER)
    manager = Launchd(host) if system == "darwin" else Systemd(host)
    manager.unit_file.parent.mkdir(parents=True, exist_ok=True)
    plan = plan_of(host, 2, arguments)
    content = (
        plistlib.dumps(plist_of(plan, "Aqua")) if system == "darwin" else manager.unit_of(plan)
    )
    manager.unit_file.write_bytes(content)
    assert manager.arguments() == tuple(arguments)
