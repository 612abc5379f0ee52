"""Defines what a service manager does for `hearth service`, and runs the managers' tools."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from hearth.commands.service.service_plan import ServicePlan
from hearth.shared.errors import StartError

# A stop is waited for: it takes 30 s at most.
TOOL_WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a manager says of the service."""

    is_loaded: bool  # the manager knows it, running or not
    pid: int | None  # of the server process
    last_exit: str  # in words, of the server before where one runs; empty if none since the load
    will_restart: bool = False  # it failed, and the manager starts it again in a moment


class ServiceManager(Protocol):
    """launchd or systemd, for one user. No method returns before what it asks for is done."""

    name: str
    unit_file: Path

    def check(self) -> str:
        """Return a hint for the user, or nothing.

        Raises:
            StartError: this session can not have a service, and what to do.
        """

    def unit_of(self, plan: ServicePlan) -> bytes:
        """Return the content of the unit file."""

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments that the unit file gives its kind's command.

        Raises:
            StartError: there is no unit file, or it is damaged.
        """

    def state(self) -> ServiceState: ...

    def load(self) -> None:
        """Read the unit file and start the service, now and at each login; end one that runs."""

    def stop(self) -> None:
        """End the server until the next `load` or login."""

    def remove(self) -> None:
        """End the server and forget the service, its unit file too."""


def damaged(unit_file: Path) -> StartError:
    return StartError(f"{unit_file} is missing or damaged. Install the service again.")


def run_tool(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a manager's tool to its end, whatever that is.

    Raises:
        StartError: it is not there, or does not end.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_WAIT_S,
        )
    except FileNotFoundError:
        raise StartError(
            f"{command[0]} is not on PATH, so there is no service manager to ask. Start what is to "
            "run under the one that this machine has."
        ) from None
    except subprocess.TimeoutExpired:
        raise StartError(
            f"`{' '.join(command)}` has not ended after {TOOL_WAIT_S:.0f} s. Run it by hand and "
            "look at what it says."
        ) from None


def failure(done: "subprocess.CompletedProcess[str]", remedy: str) -> StartError:
    """Return the error for a tool that ended badly: what was run, what it said, what to do."""
    said = " ".join((done.stderr.strip() or done.stdout.strip() or "nothing").split()).rstrip(".")
    return StartError(
        f"`{' '.join(done.args)}` ended with status {done.returncode} and said: {said}. {remedy}"
    )


def write_private(path: Path, content: bytes) -> None:
    """Replace `path` as a whole, readable by its owner only: launchd loads no file of others."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)
