"""Says what a service manager is to run: the command, its directory, its variables, its times.

launchd's file and systemd's say the same, each in its own words. No setting is in either: the
command reads them at each start, from the settings file, as it does when it is started by hand.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.commands.service.service_kinds import SERVER, ServiceKind
from hearth.shared.errors import StartError
from hearth.shared.paths import env_file
from hearth.shared.stop_times import CHUNK_WAIT_S, END_WAIT_S

STOP_S_MIN: Final = 30
# Killing a worker that hangs, and the server's own end after that of its workers.
STOP_MARGIN_S: Final = 5.0
RESTART_S: Final = 10  # between the end of a server that failed and its next start
# What is no setting, no secret, and decides where models are found.
CARRIED: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
# Where ps, lsof and caffeinate are: a service gets no shell's PATH.
TOOL_PLACES: Final = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
COMMAND: Final = (sys.executable, "-P", "-m", "hearth.commands.main", "service", "run")


@dataclass(frozen=True, slots=True)
class ServiceHost:
    """The machine and the user that a service is for."""

    system: str  # as sys.platform names it
    home: Path
    uid: int
    environ: Mapping[str, str]
    settings_file: Path
    command: tuple[str, ...] = COMMAND
    kind: ServiceKind = SERVER

    @property
    def log(self) -> Path:
        return self.home / ".hearth" / "logs" / f"service{self.kind.suffix}.log"

    @property
    def refused_mark(self) -> Path:
        """The file that is there after a start that could not succeed (`hearth service run`)."""
        return self.home / ".hearth" / f"service{self.kind.suffix}.refused"


def this_host() -> ServiceHost:
    """An install's service reads ~/.hearth/.env, wherever a command was started."""
    settings_file = env_file()
    return ServiceHost(sys.platform, Path.home(), os.getuid(), os.environ, settings_file)


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """What a unit file says, whichever manager reads it."""

    kind: ServiceKind
    command: tuple[str, ...]
    words: tuple[str, ...]  # after the command: none for the server, else what it is to run
    directory: Path
    environ: Mapping[str, str]
    stop_s: int  # from SIGTERM until the manager sends SIGKILL
    log: Path


def stop_seconds(flush_s: float) -> int:
    """Return how long a stop may take: a worker's chunk, its writing, its end, and a margin.

    A SIGKILL amid a chunk can leave memory wired until the Mac restarts.
    """
    return max(STOP_S_MIN, math.ceil(CHUNK_WAIT_S + flush_s + END_WAIT_S + STOP_MARGIN_S))


def plan_of(host: ServiceHost, flush_s: float, arguments: Sequence[str] = ()) -> ServicePlan:
    """Return the plan of a service of `host` that may write for `flush_s` at its end.

    `arguments` are those of its kind's command.

    Raises:
        StartError: a path can not be written into a unit file.
    """
    path = os.pathsep.join([os.path.dirname(host.command[0]), *TOOL_PLACES])
    carried = {name: host.environ[name] for name in CARRIED if host.environ.get(name)}
    directory = host.settings_file.parent  # relative paths in settings count from there
    environ = {"PATH": path, **carried}
    words = () if host.kind == SERVER else (host.kind.command, *arguments)
    stop_s = stop_seconds(flush_s)
    plan = ServicePlan(host.kind, host.command, words, directory, environ, stop_s, host.log)
    texts = (*plan.command, *words, *plan.environ.values(), str(directory), str(plan.log))
    for text in texts:
        if not text.isprintable():
            raise StartError(
                f"{text!r} has a character that no unit file can hold. Rename that directory."
            )
    return plan


def arguments_in(command: Sequence[str], kind: ServiceKind) -> tuple[str, ...]:
    """Return what follows the kind's name in the `command` of a unit file."""
    after = command[command.index(kind.command) + 1 :] if kind.command in command else ()
    return tuple(after)
