"""`hearth service` with a real server: installed, upgraded over the running one, uninstalled."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hearth.shared.processes import PID_FILE, read_pid_file
from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import READY_S_MAX, free_port
from tests.helpers.services.fake_service_manager import install_fakes

# The command as a Mac's user runs it, on any platform.
COMMAND = """
import sys
from hearth.commands.service import command
sys.exit(command.main(sys.argv[1:], "darwin"))
"""


def install_package(site: Path) -> None:
    """Copy the package as an install has it: its settings are not those of this checkout."""
    folders = {"shared": "shared", "proxy": "proxy", "worker": "worker"}
    for name, folder in {**folders, "commands": "scripts/commands"}.items():
        shutil.copytree(PROJECT_DIR / folder, site / "hearth" / name)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home whose path is short: its sockets' names have a limit of some 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as directory:
        yield Path(directory) / "home"


def test_a_real_server_is_installed_upgraded_and_uninstalled(home: Path, tmp_path: Path) -> None:
    port = free_port()
    (home / ".hearth").mkdir(parents=True)
    (home / ".hearth" / ".env").write_text(
        f"PROXY_PORT={port}\nMODEL_PATH={fixture_dir('qwen3', tiny=True)}\n"
    )
    install_package(tmp_path / "site")
    tools = install_fakes(tmp_path)
    environ = {
        "HOME": str(home),
        "PYTHONPATH": str(tmp_path / "site"),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    }

    def service(action: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, action],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=READY_S_MAX,
        )
        assert done.returncode == 0, done.stdout + done.stderr + log_of(home)
        return done.stdout

    def server() -> psutil.Process:
        supervisor, _ = read_pid_file(home / ".hearth" / "run" / str(port) / PID_FILE)
        assert supervisor and supervisor.is_running, log_of(home)
        return psutil.Process(supervisor.pid)

    try:
        assert service("install").startswith("Installed ")
        first = server()
        assert health_status(port) == 200, log_of(home)
        family = [first, *first.children(recursive=True)]
        assert len(family) == 2 and first.cwd() == str(home / ".hearth")

        assert service("install").startswith("Upgraded ")
        second = server()
        assert second.pid != first.pid and not any(each.is_running() for each in family)
        assert f"running (pid {second.pid})" in service("status")
        family = [second, *second.children(recursive=True)]
    finally:
        assert "Uninstalled" in service("uninstall")
    assert not any(each.is_running() for each in family)
    left = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    kept = (".hearth/kv/", ".hearth/.env", ".hearth/tmp/mlx/")  # what is kept, and kernels
    assert not [name for name in left if not name.startswith(kept)]
    assert not list((tmp_path / "manager" / "jobs").iterdir())


def health_status(port: int) -> int:
    """Return what /health answers, as soon as the server does."""
    url = f"http://127.0.0.1:{port}/health"
    for _ in range(int(READY_S_MAX / 0.1)):
        try:
            with urllib.request.urlopen(url, timeout=READY_S_MAX) as answer:
                status: int = answer.status
                return status
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def log_of(home: Path) -> str:
    log = home / ".hearth" / "logs" / "service.log"
    return log.read_text() if log.exists() else "no log"
