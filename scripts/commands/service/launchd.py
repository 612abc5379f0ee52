"""Runs the server as a launchd agent of this user, on macOS.

Source: launchd.plist(5), launchctl(1). `launchctl print` is no interface: what is not found in its
output is not known.
"""

import os
import plistlib
import re
import time
from pathlib import Path
from typing import Final

from hearth.commands.service import service_manager
from hearth.commands.service.service_manager import RESTART_S, STOP_S, ServiceState, run_tool
from hearth.shared.errors import EXIT_CANNOT_START, StartError

LABEL: Final = "local.hearth.server"
OPEN_FILES: Final = 4096  # launchd's own limit is 256, and the server serves 1,000 clients
UNLOAD_WAIT_S: Final = 120.0  # longer than any ExitTimeOut, at whose end comes a SIGKILL
REMEDY: Final = "Run it as the user whose service it is, logged in at the screen, without sudo."


class Launchd:
    """Keeps the agent in the domain of the user's graphical session."""

    name = "launchd"

    def __init__(self, directory: Path) -> None:
        """`directory` is where the server is started."""
        self._directory = directory
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{LABEL}"
        self.unit_file = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def check(self) -> str:
        """Return nothing to say. Raises: StartError: there is no graphical session."""
        run_tool("launchctl", "print", self._domain, remedy=REMEDY)
        return ""

    def unit_of(self) -> bytes:
        """Return the agent's property list."""
        log = str(service_manager.log_file())
        plist = {
            "Label": LABEL,
            # launchd cannot be told which exit status means that a restart would be in vain.
            "ProgramArguments": [*service_manager.COMMAND, "--end-with-0-if-refused"],
            "WorkingDirectory": str(self._directory),
            "EnvironmentVariables": service_manager.variables(),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},  # only after a failure
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": STOP_S,
            # Every other type throttles CPU and disk, which makes prefill several times slower.
            "ProcessType": "Interactive",
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        return plistlib.dumps(plist, sort_keys=False)

    def state(self) -> ServiceState | None:
        """Return how it is; None if it is not loaded."""
        done = run_tool("launchctl", "print", self._target)
        if done.returncode:
            return None
        return parse_print(done.stdout, is_refused=service_manager.refused_mark().exists())

    def load(self) -> None:
        """Read the unit file and start the service, now and at each login; end one that runs."""
        self.stop()
        run_tool("launchctl", "enable", self._target, remedy=REMEDY)  # after a `disable`
        run_tool("launchctl", "bootstrap", self._domain, str(self.unit_file), remedy=REMEDY)

    def stop(self) -> None:
        """End the server until the next `load` or login."""
        deadline = time.monotonic() + UNLOAD_WAIT_S
        while self.state() is not None:
            # It returns before the process has ended, sometimes with 36, "now in progress".
            done = run_tool("launchctl", "bootout", self._target)
            if time.monotonic() > deadline:
                raise StartError(f"It does not end: {done.stderr.strip()}. Log out and in.")
            time.sleep(0.1)

    def remove(self) -> None:
        """End the server and forget the service, its unit file too."""
        self.stop()
        self.unit_file.unlink(missing_ok=True)


def parse_print(text: str, *, is_refused: bool = False) -> ServiceState:
    """Return what `launchctl print` says of a service that is loaded."""
    pid = re.search(r"^\tpid = (\d+)$", text, re.MULTILINE)
    ended = re.search(r"^\tlast exit code = (-?\d+)", text, re.MULTILINE)
    signalled = re.search(r"^\tlast terminating signal = (.+)$", text, re.MULTILINE)
    how = f"signal {signalled[1]}" if signalled else f"exit status {ended[1]}" if ended else ""
    if pid:
        return ServiceState(int(pid[1]), how)
    if is_refused:
        how = f"exit status {EXIT_CANNOT_START}"  # it ended with 0 for launchd
    return ServiceState(None, how, will_restart=how not in ("", "exit status 0") and not is_refused)
