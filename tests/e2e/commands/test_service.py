"""A server that launchd runs by our unit file is a real one, keeps to its home and ends as told."""

import plistlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from hearth.commands.service import service_manager
from hearth.commands.service.launchd import Launchd
from hearth.shared.paths import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import READY_S_MAX, free_port, until

pytestmark = pytest.mark.night


def install_package(site: Path) -> None:
    """Copy the package as an install has it: its settings are not those of this checkout."""
    folders = {"shared": "shared", "proxy": "proxy", "worker": "worker"}
    for name, folder in {**folders, "commands": "scripts/commands"}.items():
        shutil.copytree(PROJECT_DIR / folder, site / "hearth" / name)


def is_ready(server: "subprocess.Popen[bytes]", port: int) -> bool:
    assert server.poll() is None
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def home() -> Iterator[Path]:
    """A home whose path is short: its sockets' names have a limit of some 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="hearth-") as directory:
        (Path(directory) / ".hearth" / "logs").mkdir(parents=True)
        yield Path(directory)


def test_a_real_server_runs_as_a_service_and_leaves_what_is_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, model = free_port(), fixture_dir("qwen3", tiny=True)
    for name in service_manager.CARRIED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    (home / ".hearth" / ".env").write_text(f"PROXY_PORT={port}\nMODEL_PATH={model}\n")
    install_package(tmp_path / "site")
    told = plistlib.loads(Launchd(home / ".hearth").unit_of())
    given = {"HOME": str(home), "PYTHONPATH": str(tmp_path / "site")}
    server = subprocess.Popen(
        told["ProgramArguments"],
        cwd=told["WorkingDirectory"],
        env=told["EnvironmentVariables"] | given,
        stdin=subprocess.DEVNULL,
    )
    try:
        until(lambda: is_ready(server, port), READY_S_MAX)
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) == 1 and all(each.cwd() == str(home / ".hearth") for each in family)
    finally:
        server.terminate()
        assert server.wait(told["ExitTimeOut"]) == 0
    assert not any(each.is_running() for each in family)
    left = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    # What is kept, the log that goes with an uninstall, and kernels.
    kept = (".hearth/kv/", ".hearth/.env", ".hearth/logs/service.log", ".hearth/tmp/mlx/")
    assert not [name for name in left if not name.startswith(kept)]
