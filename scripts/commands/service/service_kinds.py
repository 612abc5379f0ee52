"""Names the commands that may be a service, and says what each one's start depends on.

Every kind is a command of `hearth` that runs until a signal, takes a second one as "at once", and
ends with 78 where it cannot start as configured. A user has one service of each kind.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.commands.main import COMMANDS
from hearth.commands.ranks import command as ranks
from hearth.commands.ranks.join_ranks import check_rank_keys, endpoint_of
from hearth.commands.worker import command as worker
from hearth.shared.errors import StartError
from hearth.shared.processes import PID_FILE, read_pid_file, take_port, url_of
from hearth.shared.settings_from_env import Settings, load_settings

StatusOf = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """A command that may be a service, and how its files are told from those of others."""

    command: str  # of `hearth`
    suffix: str  # of file names; the server's have none
    label: str  # launchd's name of it
    about: str  # systemd's line about it

    @property
    def unit(self) -> str:
        """Return systemd's name of it."""
        return f"hearth{self.suffix}.service"


SERVER: Final = ServiceKind(
    "serve", "", "local.hearth.server", "Hearth, a local LLM server for agents"
)
WORKER: Final = ServiceKind(
    "worker", "-worker", "local.hearth.worker", "Hearth, a worker for proxies on other machines"
)
RANKS: Final = ServiceKind(
    "ranks", "-ranks", "local.hearth.ranks", "Hearth, a part of a model that other machines share"
)
KINDS: Final = {kind.command: kind for kind in (SERVER, WORKER, RANKS)}


class ServedPort:
    """What the server's start depends on: its settings, and a port that is free."""

    def __init__(self, settings_file: Path, arguments: Sequence[str]) -> None:
        """Raises: StartError: the arguments are not what the command takes."""
        self._file = settings_file
        if arguments:
            raise StartError(f"The server's settings are those of {settings_file}: set them there.")

    def settings(self) -> Settings:
        """Return the settings as the service reads them: nothing of this shell's variables."""
        return load_settings({}, self._file)

    def address(self, settings: Settings) -> str:
        return url_of(settings.proxy_host, settings.proxy_port)

    def check_port(self, settings: Settings) -> None:
        """Raises: StartError: another process has it."""
        take_port(settings.proxy_host, settings.proxy_port, settings.instance_dir, is_check=True)

    def supervisor_pid(self, settings: Settings) -> int | None:
        """Return the process that serves there, be it started by hand, if it is a Hearth."""
        supervisor, _ = read_pid_file(settings.instance_dir / PID_FILE)
        return supervisor.pid if supervisor and supervisor.is_running else None

    def is_up(self, pid: int, settings: Settings) -> bool:
        """Return whether the service's process has begun what it is for."""
        return self.supervisor_pid(settings) == pid


class WorkerPort(ServedPort):
    """What a worker for other machines depends on: its endpoint, its keys, its settings."""

    def __init__(self, settings_file: Path, arguments: Sequence[str]) -> None:
        super().__init__(settings_file, ())
        options = worker.options_of(arguments)
        self._model: str | None = options.model
        self._endpoint = worker.listen_endpoint(options.endpoint)

    def settings(self) -> Settings:
        before = worker.variables_of(self._endpoint, self._model)
        return load_settings(before, self._file)

    def address(self, settings: Settings) -> str:
        return str(self._endpoint)

    def check_port(self, settings: Settings) -> None:
        worker.check_keys(settings)
        worker.port_of(self._endpoint, settings, is_check=True)


class JoinedRanks(ServedPort):
    """What `hearth ranks join` depends on: rank 0's address, its keys, its settings. No port."""

    def __init__(self, settings_file: Path, arguments: Sequence[str]) -> None:
        super().__init__(settings_file, ())
        options = ranks.options_of(arguments)
        if options.what != "join":
            raise StartError(f"A service is `ranks join`, and not `ranks {options.what}`.")
        self._leader: str = options.leader

    def address(self, settings: Settings) -> str:
        """Return where rank 0 is."""
        return endpoint_of(self._leader, settings)

    def check_port(self, settings: Settings) -> None:
        self.address(settings)
        check_rank_keys(settings)

    def supervisor_pid(self, settings: Settings) -> int | None:
        return None

    def is_up(self, pid: int, settings: Settings) -> bool:
        return True


START: Final = {SERVER: ServedPort, WORKER: WorkerPort, RANKS: JoinedRanks}


def become(kind: ServiceKind, arguments: Sequence[str], status_of: StatusOf) -> int:
    """Run the command in this process; return its exit status where it returns at all."""
    module = importlib.import_module(f"hearth.commands.{COMMANDS[kind.command].module}")
    if kind is RANKS:
        return status_of(module.main(arguments))
    status: int = module.main(arguments, status_of)
    return status
