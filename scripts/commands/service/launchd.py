"""Runs a service as a launchd agent of this user, on macOS.

Source: launchd.plist(5), launchctl(1). `launchctl print` is no interface: what is not found in its
output is not known.
"""

import functools
import plistlib
import re
import time
from pathlib import Path
from typing import Any, Final

from hearth.commands.service.service_manager import (
    TOOL_WAIT_S,
    ServiceState,
    damaged,
    failure,
    run_tool,
)
from hearth.commands.service.service_plan import (
    RESTART_S,
    ServiceHost,
    ServicePlan,
    arguments_in,
)
from hearth.shared.errors import EXIT_CANNOT_START

OPEN_FILES: Final = 4096  # launchd's own limit is 256, and the server serves 1,000 clients
# Longer than any ExitTimeOut, at whose end launchd sends SIGKILL: the file may be new, the job old.
UNLOAD_WAIT_S: Final = TOOL_WAIT_S
POLL_S: Final = 0.1
REFUSED: Final = (
    f"exit status {EXIT_CANNOT_START}: it cannot start as configured, and is not started again"
)
GUARDED: Final = ("Desktop", "Documents", "Downloads", "Library/Mobile Documents")


class Launchd:
    """Keeps the agent in the domain of the graphical session, or of the user where there is none.

    A domain of ssh alone has no agents of the session type Aqua, so the file names the type.
    """

    name = "launchd"

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._label = host.kind.label
        self._domains = {"Aqua": f"gui/{host.uid}", "Background": f"user/{host.uid}"}
        self.unit_file = host.home / "Library" / "LaunchAgents" / f"{self._label}.plist"

    def check(self) -> str:
        if self._session == "Aqua":
            return ""
        return (
            "There is no graphical session, so the service is loaded into "
            f"{self._domains[self._session]}: it starts when you log in, over ssh too."
        )

    def unit_of(self, plan: ServicePlan) -> bytes:
        return plistlib.dumps(plist_of(plan, self._session), sort_keys=False)

    def arguments(self) -> tuple[str, ...]:
        try:
            command = plistlib.loads(self.unit_file.read_bytes())["ProgramArguments"]
        except (OSError, ValueError, LookupError, TypeError):
            raise damaged(self.unit_file) from None
        return arguments_in(command, self._host.kind)

    def state(self) -> ServiceState:
        printed = self._printed()
        if printed is None:
            return ServiceState(False, None, self._refused())
        return parse_print(printed[1], self._refused())

    def load(self) -> None:
        self.stop()
        domain = self._domains[self._session]
        if is_disabled(domain, self._label):  # `launchctl disable`, which no bootstrap undoes
            self._run("enable", f"{domain}/{self._label}")
        self._run("bootstrap", domain, str(self.unit_file))

    def stop(self) -> None:
        while (printed := self._printed()) is not None:
            target = printed[0]
            # It returns before the process has ended, sometimes with 36, "now in progress".
            done = run_tool("launchctl", "bootout", target)
            if not is_gone(target):
                raise failure(
                    done, f"It is still loaded {UNLOAD_WAIT_S:.0f} s later. Log out and in."
                )

    def remove(self) -> None:
        self.stop()
        self.unit_file.unlink(missing_ok=True)

    @functools.cached_property
    def _session(self) -> str:
        has_gui = run_tool("launchctl", "print", self._domains["Aqua"]).returncode == 0
        return "Aqua" if has_gui else "Background"

    def _printed(self) -> tuple[str, str] | None:
        """Return the service as launchd names it, and what it prints; None if it is not loaded."""
        for domain in self._domains.values():
            done = run_tool("launchctl", "print", target := f"{domain}/{self._label}")
            if done.returncode == 0:
                return target, done.stdout
        return None

    def _refused(self) -> str:
        return REFUSED if self._host.refused_mark.exists() else ""

    def _run(self, *arguments: str) -> None:
        done = run_tool("launchctl", *arguments)
        if done.returncode:
            raise failure(
                done,
                "Run it in a session of the user whose service it is, without sudo; the same "
                "command by hand says more where it is run as root.",
            )


def is_gone(target: str) -> bool:
    """Wait until launchd knows no `target`; return whether that came."""
    deadline = time.monotonic() + UNLOAD_WAIT_S
    while run_tool("launchctl", "print", target).returncode == 0:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def is_disabled(domain: str, label: str) -> bool:
    said = run_tool("launchctl", "print-disabled", domain).stdout
    return re.search(rf'"{re.escape(label)}" => (disabled|true)', said) is not None


def plist_of(plan: ServicePlan, session: str) -> dict[str, Any]:
    """Return the agent's property list."""
    return {
        "Label": plan.kind.label,
        # launchd can not be told which exit status means that a restart would be in vain.
        "ProgramArguments": [*plan.command, "--end-with-0-if-refused", *plan.words],
        "WorkingDirectory": str(plan.directory),
        "EnvironmentVariables": dict(plan.environ),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},  # only after a failure
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": plan.stop_s,
        # Every other type throttles CPU and disk, which makes prefill several times slower.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "Umask": 0o077,
        "LimitLoadToSessionType": session,
        "StandardOutPath": str(plan.log),
        "StandardErrorPath": str(plan.log),
    }


def parse_print(text: str, refused: str = "") -> ServiceState:
    """Return what `launchctl print` says of a service that is loaded."""
    pid = re.search(r"^\tpid = (\d+)$", text, re.MULTILINE)
    ended = re.search(r"^\tlast exit code = (-?\d+)", text, re.MULTILINE)
    signalled = re.search(r"^\tlast terminating signal = (.+)$", text, re.MULTILINE)
    how = f"signal {signalled[1]}" if signalled else f"exit status {ended[1]}" if ended else ""
    if pid:
        return ServiceState(True, int(pid[1]), how)
    is_failure = bool(signalled) or (ended is not None and ended[1] != "0")
    return ServiceState(True, None, refused or how, will_restart=is_failure)


def guarded_folder(home: Path, directory: Path) -> str:
    """Return the folder whose files macOS keeps from programs without the user's consent."""
    found = [name for name in GUARDED if directory.is_relative_to(home / name)]
    return f"~/{found[0]}" if found else ""
