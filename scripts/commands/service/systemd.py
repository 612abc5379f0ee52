"""Runs a service as a systemd unit of this user, on Linux.

Source: systemd.service(5), systemd.exec(5), systemd.kill(5), systemctl(1).
"""

import re
import signal
from collections.abc import Mapping
from typing import Final

from hearth.commands.service.service_kinds import SERVER
from hearth.commands.service.service_manager import ServiceState, damaged, failure, run_tool
from hearth.commands.service.service_plan import (
    RESTART_S,
    ServiceHost,
    ServicePlan,
    arguments_in,
)
from hearth.shared.errors import EXIT_CANNOT_START, StartError

SHOWN: Final = ("LoadState", "SubState", "MainPID", "ExecMainCode", "ExecMainStatus", "NRestarts")
UNSTARTABLE: Final = "\"'\\"
EXITED: Final = "1"  # ExecMainCode, as CLD_EXITED: above it, a signal ended the process


class Systemd:
    """Keeps a unit of the user's own manager, which lives as long as the user is logged in."""

    name = "systemd"

    def __init__(self, host: ServiceHost) -> None:
        config = host.environ.get("XDG_CONFIG_HOME") or host.home / ".config"
        self._uid = host.uid
        self._kind = host.kind
        self._unit = host.kind.unit
        self.unit_file = host.home / config / "systemd" / "user" / self._unit

    def check(self) -> str:
        done = run_tool("systemctl", "--user", "show-environment")
        if done.returncode:
            raise failure(
                done,
                "This session has no systemd of its user: log in as that user, without su or sudo, "
                f"or run `sudo loginctl enable-linger {self._uid}` and log in again. Where there "
                "is no systemd, start the command by what the machine has.",
            )
        lingers = run_tool("loginctl", "show-user", str(self._uid), "--property=Linger")
        if "Linger=no" not in lingers.stdout:
            return ""
        return (
            "It ends when you log out. To have it run from boot on: "
            f"sudo loginctl enable-linger {self._uid}"
        )

    def unit_of(self, plan: ServicePlan) -> bytes:
        return unit_text(plan).encode()

    def arguments(self) -> tuple[str, ...]:
        try:
            text = self.unit_file.read_text()
        except (OSError, UnicodeDecodeError):
            raise damaged(self.unit_file) from None
        return arguments_in(command_in(text), self._kind)

    def state(self) -> ServiceState:
        done = self._run("show", self._unit, f"--property={','.join(SHOWN)}")
        return parse_show(done, self._unit)

    def load(self) -> None:
        self._run("daemon-reload")
        self._run("enable", self._unit)
        self._run("restart", self._unit)

    def stop(self) -> None:
        if self.state().is_loaded:
            self._run("stop", self._unit)

    def remove(self) -> None:
        if self.unit_file.exists() or self.state().is_loaded:
            self._run("disable", "--now", self._unit)
        self.unit_file.unlink(missing_ok=True)
        self._run("daemon-reload")
        run_tool("systemctl", "--user", "reset-failed", self._unit)  # fails where it has not failed

    def _run(self, *arguments: str) -> str:
        done = run_tool("systemctl", "--user", *arguments)
        if done.returncode:
            raise failure(done, f"`systemctl --user status {self._unit}` may say more.")
        return done.stdout


def unit_text(plan: ServicePlan) -> str:
    """Return the unit file. Type=exec: the server answers while it loads its model.

    Raises:
        StartError: systemd would not start a program of that name.
    """
    environment = " ".join(quoted(f"{name}={text}") for name, text in plan.environ.items())
    program, *arguments = plan.command
    if set(program) & set(UNSTARTABLE):
        raise StartError(
            f"systemd starts no program whose path has one of {UNSTARTABLE}, and this is "
            f"{program}. Rename that directory."
        )
    command = [
        quoted(program),
        *(quoted(each).replace("$", "$$") for each in (*arguments, *plan.words)),
    ]
    return f"""\
[Unit]
Description={plan.kind.about}

[Service]
Type=exec
ExecStart={" ".join(command)}
WorkingDirectory={escaped(str(plan.directory))}
Environment={environment}
StandardOutput=append:{escaped(str(plan.log))}
StandardError=inherit
UMask=0077
# Only after a failure, and not where the same settings would fail again.
Restart=on-failure
RestartSec={RESTART_S}
RestartPreventExitStatus={EXIT_CANNOT_START}
# The server ends its workers itself; those that are left after its end are killed.
KillMode=mixed
TimeoutStopSec={plan.stop_s}

[Install]
WantedBy=default.target
"""


def escaped(text: str) -> str:
    """Return `text` without specifiers."""
    return text.replace("%", "%%")


def quoted(text: str) -> str:
    """Return `text` as one word of a unit file."""
    return '"' + escaped(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def command_in(text: str) -> list[str]:
    """Return the words that a unit file of ours starts, as `unit_text` was given them."""
    line = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', line[1]) if line else []
    plain = [re.sub(r"\\(.)", r"\1", word) for word in words]
    return [word.replace("$$", "$").replace("%%", "%") for word in plain]


def parse_show(text: str, unit: str = SERVER.unit) -> ServiceState:
    """Return what `systemctl show` says. Raises: StartError: it says nothing of the unit."""
    found = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    if missing := [name for name in SHOWN if name not in found]:
        raise StartError(
            f"`systemctl --user show {unit}` says nothing of {', '.join(missing)}. Hearth needs "
            "systemd 240 or newer."
        )
    pid = int(found["MainPID"]) or None
    is_loaded = found["LoadState"] == "loaded"
    will_restart = found["SubState"] == "auto-restart"
    return ServiceState(is_loaded, pid, how_ended(found, pid), will_restart)


def how_ended(found: Mapping[str, str], pid: int | None) -> str:
    """Return the last exit in words; of a process before the one that runs, systemd knows less."""
    if pid is not None:
        times = int(found["NRestarts"])
        return f"a failure, for the {times}. time since it was loaded" if times else ""
    code, status = found["ExecMainCode"], int(found["ExecMainStatus"])
    if code == "0":
        return ""
    if code == EXITED and status == EXIT_CANNOT_START:
        return f"exit status {status}: it cannot start as configured, and is not started again"
    return f"exit status {status}" if code == EXITED else signal_name(status)


def signal_name(number: int) -> str:
    return (
        f"signal {signal.Signals(number).name}"
        if number in set(signal.Signals)
        else f"signal {number}"
    )
