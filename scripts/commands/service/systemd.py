"""Runs the server as a systemd unit of this user, on Linux.

Source: systemd.service(5), systemd.exec(5), systemd.kill(5), systemctl(1).
"""

import os
import re
import signal
from pathlib import Path
from typing import Final

from hearth.commands.service import service_manager
from hearth.commands.service.service_manager import RESTART_S, STOP_S, ServiceState, run_tool
from hearth.shared.errors import EXIT_CANNOT_START

UNIT: Final = "hearth.service"
SHOWN: Final = "LoadState,SubState,MainPID,ExecMainCode,ExecMainStatus,NRestarts"
EXITED: Final = "1"  # ExecMainCode, as CLD_EXITED: above it, a signal ended the process


class Systemd:
    """Keeps a unit of the user's own manager, which lives as long as the user is logged in."""

    name = "systemd"

    def __init__(self, directory: Path) -> None:
        """`directory` is where the server is started."""
        self._directory = directory
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        self.unit_file = config / "systemd" / "user" / UNIT

    def check(self) -> str:
        """Return a hint for the user. Raises: StartError: this session can have no service."""
        linger = f"sudo loginctl enable-linger {os.getuid()}"
        login = "This session has no systemd of its user: log in as that user, without su or sudo"
        self._run("show-environment", remedy=f"{login}, or run `{linger}` and log in again.")
        told = run_tool("loginctl", "show-user", str(os.getuid()), "--property=Linger")
        hint = f"It ends when you log out. To have it run from boot on: {linger}"
        return hint if "Linger=no" in told.stdout else ""

    def unit_of(self) -> bytes:
        """Return the unit file.

        Type=exec: the server answers while it loads its model.
        """
        environment = service_manager.variables().items()
        program, *arguments = service_manager.COMMAND
        words = [quoted(program), *(quoted(each).replace("$", "$$") for each in arguments)]
        return f"""\
[Unit]
Description=Hearth, a local LLM server for agents

[Service]
Type=exec
ExecStart={" ".join(words)}
WorkingDirectory={escaped(str(self._directory))}
Environment={" ".join(quoted(f"{name}={text}") for name, text in environment)}
StandardOutput=append:{escaped(str(service_manager.log_file()))}
StandardError=inherit
UMask=0077
# Only after a failure, and not where the same settings would fail again.
Restart=on-failure
RestartSec={RESTART_S}
RestartPreventExitStatus={EXIT_CANNOT_START}
# The server ends its workers itself; those that are left after its end are killed.
KillMode=mixed
TimeoutStopSec={STOP_S}

[Install]
WantedBy=default.target
""".encode()

    def state(self) -> ServiceState | None:
        """Return how it is; None if it is not loaded."""
        return parse_show(self._run("show", UNIT, f"--property={SHOWN}"))

    def load(self) -> None:
        """Read the unit file and start the service, now and at each login; end one that runs."""
        self._run("daemon-reload")
        self._run("enable", UNIT)
        self._run("restart", UNIT)

    def stop(self) -> None:
        """End the server until the next `load` or login."""
        if self.state() is not None:
            self._run("stop", UNIT)

    def remove(self) -> None:
        """End the server and forget the service, its unit file too."""
        if self.unit_file.exists() or self.state() is not None:
            self._run("disable", "--now", UNIT)
        self.unit_file.unlink(missing_ok=True)
        self._run("daemon-reload")
        run_tool("systemctl", "--user", "reset-failed", UNIT)  # fails where it has not failed

    def _run(self, *arguments: str, remedy: str = "`systemctl --user status` may say more.") -> str:
        return run_tool("systemctl", "--user", *arguments, remedy=remedy).stdout


def escaped(text: str) -> str:
    """Return `text` without specifiers."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """Return `text` as one word of a unit file."""
    return '"' + escaped(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse_show(text: str) -> ServiceState | None:
    """Return what `systemctl show` says; systemd is 240 or newer."""
    found = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    if found["LoadState"] != "loaded":
        return None
    pid, status, how = int(found["MainPID"]) or None, int(found["ExecMainStatus"]), ""
    if pid is not None and found["NRestarts"] != "0":
        how = f"a failure, for the {found['NRestarts']}. time since it was loaded"
    elif found["ExecMainCode"] == EXITED:
        how = f"exit status {status}"
    elif found["ExecMainCode"] != "0":
        how = f"signal {status} ({signal.strsignal(status)})"
    is_again = found["SubState"] == "auto-restart"
    return ServiceState(pid, how, will_restart=is_again)
