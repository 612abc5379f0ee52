"""Gives a home whose launchd or systemd is played here, and a stand-in for the server."""

import json
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hearth.commands.service import command, service_manager
from hearth.shared.processes import PID_FILE, process_started
from tests.helpers.servers.server import free_port

# Stands for the server: it writes the pid file as the server does, and ends as it is told.
SERVER = """
import json, os, signal, sys
from pathlib import Path
from hearth.shared.processes import process_started
run_dir, home = map(Path, sys.argv[1:3])
with open(home / "starts", "a") as starts:
    starts.write(f"{os.getcwd()}\\n")
if (home / "refuses").exists():
    (home / ".hearth" / "logs" / "service.log").write_text("MODEL_PATH is refused.\\n")
    (home / ".hearth" / "service.refused").touch()
    sys.exit(0 if "--end-with-0-if-refused" in sys.argv else 78)
signal.signal(signal.SIGTERM, lambda *_: ((run_dir / "hearth.json").unlink(), os._exit(0)))
run_dir.mkdir(parents=True, exist_ok=True)
row = {"pid": os.getpid(), "started": process_started(os.getpid())}
(run_dir / "new").write_text(json.dumps({"supervisor": row, "children": []}))
(run_dir / "new").rename(run_dir / "hearth.json")
while True:
    signal.pause()
"""


class FakeManager:
    """Answers launchctl, systemctl and loginctl, and starts and ends the process of one service.

    What a test puts into `errors`, by verb, is what the tool says and fails with.
    """

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
        """Stand in for `subprocess.run`."""
        verb = words[2] if words[0] == "systemctl" else words[1]
        status, said = 1, self.errors.get(verb, "")
        if not said:
            status, said = getattr(self, words[0])(verb, *words[2:])
        return subprocess.CompletedProcess(words, status, said, said)

    def loginctl(self, *_: str) -> tuple[int, str]:
        return 0, "Linger=no"

    def launchctl(self, verb: str, target: str, *more: str) -> tuple[int, str]:
        if verb == "bootstrap":
            plist = plistlib.loads(Path(more[0]).read_bytes())
            self._start(plist["ProgramArguments"], plist["WorkingDirectory"])
        elif verb == "bootout":
            self._end()
            self.process = None
        elif verb == "print" and target.count("/") == 2:
            if self.process is None:
                return 113, "Could not find service"
            status = self.process.poll()
            told = f"pid = {self.process.pid}" if status is None else f"last exit code = {status}"
            return 0, f"\t{told}\n"
        return 0, ""

    def systemctl(self, verb: str, *more: str) -> tuple[int, str]:
        if verb == "restart":
            self._end()
            unit = Path.home() / ".config/systemd/user/hearth.service"
            lines = unit.read_text().splitlines()
            rows = dict(line.split("=", 1) for line in lines if "=" in line)
            plain = rows["ExecStart"].replace("$$", "").replace("%%", "")
            assert not {"$", "%"} & set(plain), "systemd would put something in its place"
            words = shlex.split(rows["ExecStart"].replace("%%", "%").replace("$$", "$"))
            self._start(words, rows["WorkingDirectory"].replace("%%", "%"))
        elif verb in ("stop", "disable"):
            self._end()
        elif verb == "show":
            return 0, self._shown()
        return 0, ""

    def _shown(self) -> str:
        status = None if self.process is None else self.process.poll()
        is_alive = self.process is not None and status is None
        rows = {
            "LoadState": "not-found" if self.process is None else "loaded",
            "SubState": "running" if is_alive else "dead",
            "MainPID": self.process.pid if self.process is not None and is_alive else 0,
            "ExecMainCode": 0 if status is None else 1,
            "ExecMainStatus": status or 0,
            "NRestarts": 0,
        }
        return "\n".join(f"{name}={value}" for name, value in rows.items())

    def _start(self, words: Sequence[str], directory: str) -> None:
        self.process = subprocess.Popen(words, cwd=directory)

    def _end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


class ServiceHome:
    """A user's home on `system`, with its fake manager."""

    def __init__(self, directory: Path, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.system = system
        self.manager = FakeManager()
        self.home = directory / 'a home $x %h "q"'
        self.port = free_port()
        self.run_dir = directory / "run" / str(self.port)
        self.settings_file = self.home / ".hearth" / ".env"
        self.settings_file.parent.mkdir(parents=True)
        self.settings_file.write_text(f"PROXY_PORT={self.port}\nRUN_DIR={directory / 'run'}\n")
        places = {
            "darwin": "Library/LaunchAgents/local.hearth.server.plist",
            "linux": ".config/systemd/user/hearth.service",
        }
        self.unit = self.home / places[system]
        server = directory / "server.py"
        server.write_text(SERVER)
        started = (sys.executable, str(server), str(self.run_dir), str(self.home))
        monkeypatch.setattr(service_manager, "COMMAND", started)
        tools = SimpleNamespace(run=self.manager.run, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(service_manager, "subprocess", tools)
        monkeypatch.setenv("HOME", str(self.home))
        for name in ("XDG_CONFIG_HOME", *service_manager.CARRIED):
            monkeypatch.delenv(name, raising=False)

    def run(self, *arguments: str) -> int:
        return command.main(arguments, self.system, self.settings_file)

    @property
    def pid(self) -> int | None:
        """The process that serves."""
        try:
            row = json.loads((self.run_dir / PID_FILE).read_text())["supervisor"]
        except FileNotFoundError:
            return None
        pid: int = row["pid"]
        return pid if process_started(pid) == row["started"] else None

    def files(self) -> set[str]:
        return {str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file()}
