"""Names what launchd and systemd are told alike, and runs their tools."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.models.model_path import MODELS_DIR_VARIABLE

# How long a stop may take: a worker's chunk, its writing, its end, the death of one that hangs and
# the server's own. A SIGKILL amid a chunk can leave memory wired until the Mac restarts.
STOP_S: Final = 30
TOOL_WAIT_S: Final = 120.0  # a stop takes 30 s at most
RESTART_S: Final = 10  # between the end of a server that failed and its next start
# What is no setting, no secret, and decides where models are found.
CARRIED: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", MODELS_DIR_VARIABLE)
# Where ps, lsof and caffeinate are: a service gets no shell's PATH.
TOOL_PLACES: Final = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
COMMAND: Final = (sys.executable, "-P", "-m", "hearth.commands.main", "service", "run")


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a manager says of a service that is loaded."""

    pid: int | None  # of the server process
    last_exit: str  # in words; empty if none since the load
    will_restart: bool = False  # it failed, and the manager starts it again in a moment


def log_file() -> Path:
    return Path.home() / ".hearth" / "logs" / "service.log"


def refused_mark() -> Path:
    """Return the file that is there after a start that could not succeed."""
    return Path.home() / ".hearth" / "service.refused"


def variables() -> dict[str, str]:
    """Return the service's environment. No setting is in it: they are read at each start."""
    path = os.pathsep.join([os.path.dirname(COMMAND[0]), *TOOL_PLACES])
    return {"PATH": path} | {name: os.environ[name] for name in CARRIED if os.environ.get(name)}


def run_tool(*command: str, remedy: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a manager's tool to its end; with `remedy`, a bad end is an error that tells it.

    Raises:
        StartError: it is not there, does not end, or ended badly.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_WAIT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise StartError(f"{error}. Start `hearth serve` by what this machine has.") from None
    if remedy and done.returncode:
        said = " ".join((done.stderr or done.stdout).split()).rstrip(".")
        told = f"`{' '.join(command)}` ended with status {done.returncode}: {said}."
        raise StartError(f"{told} {remedy}")
    return done
