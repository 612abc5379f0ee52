"""Gives a home whose service manager is a fake, and a stand-in for the server that it starts."""

import json
import os
import sys
from pathlib import Path

import pytest

from hearth.commands.service import command, service_manager
from hearth.shared.processes import PID_FILE, process_started
from tests.helpers.servers.server import free_port
from tests.helpers.services.fake_service_manager import install_fakes

# Stands for the server: it writes the pid file as the server does, and ends as it is told.
SERVER = """
import json, os, signal, sys
from pathlib import Path
from hearth.shared.processes import process_started
run_dir, home = map(Path, sys.argv[1:3])
with open(home / "starts", "a") as starts:
    starts.write(f"{os.getpid()} {os.getcwd()}\\n")
if (home / "refuses").exists():
    print("MODEL_PATH is refused.", file=sys.stderr)
    if "--end-with-0-if-refused" not in sys.argv:
        sys.exit(78)
    (home / ".hearth" / "service.refused").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: ((run_dir / "hearth.json").unlink(), os._exit(0)))
run_dir.mkdir(parents=True, exist_ok=True)
row = {"pid": os.getpid(), "started": process_started(os.getpid())}
(run_dir / "new").write_text(json.dumps({"supervisor": row, "children": []}))
(run_dir / "new").rename(run_dir / "hearth.json")
while True:
    signal.pause()
"""


class Desk:
    """A user's home on `system`, whose service manager is a fake."""

    def __init__(self, directory: Path, system: str) -> None:
        self.system = system
        self.directory = directory
        self.home = directory / 'a home $x %h "q"'
        self.port = free_port()
        self.run_dir = directory / "run" / str(self.port)
        self.settings_file = self.home / ".hearth" / ".env"
        self.settings_file.parent.mkdir(parents=True)
        self.settings_file.write_text(f"PROXY_PORT={self.port}\nRUN_DIR={directory / 'run'}\n")
        server = directory / "server.py"
        server.write_text(SERVER)
        self.command = (sys.executable, str(server), str(self.run_dir), str(self.home))
        places = {
            "darwin": "Library/LaunchAgents/local.hearth.server.plist",
            "linux": ".config/systemd/user/hearth.service",
        }
        self.unit = self.home / places[system]

    def add_setting(self, line: str) -> None:
        with self.settings_file.open("a") as file:
            print(line, file=file)

    def run(self, *arguments: str) -> int:
        return command.main(arguments, self.system, self.settings_file)

    def uninstall_all(self) -> None:
        if self.jobs:
            self.run("uninstall")

    @property
    def pid(self) -> int | None:
        """The process that serves."""
        try:
            row = json.loads((self.run_dir / PID_FILE).read_text())["supervisor"]
        except FileNotFoundError:
            return None
        pid: int = row["pid"]
        return pid if process_started(pid) == row["started"] else None

    @property
    def jobs(self) -> list[Path]:
        return list((self.directory / "manager" / "jobs").iterdir())

    def set_domains(self, *names: str) -> None:
        (self.directory / "manager" / "domains").write_text(" ".join(names))

    def files(self) -> set[str]:
        return {str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file()}


def desk_of(system: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(directory, system)
    tools = install_fakes(directory)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(desk.home))
    for name in ("XDG_CONFIG_HOME", *service_manager.CARRIED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(service_manager, "COMMAND", desk.command)
    return desk
