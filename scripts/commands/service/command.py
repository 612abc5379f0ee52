"""Installs, starts, stops and shows the server as a service of this user: launchd, systemd.

    hearth service install      starts it now and at each login; over one that runs: an upgrade
    hearth service status       says whether it runs, where, and how it ended last
    hearth service logs -f      shows the end of its log, and what comes
    hearth service stop         ends it until `hearth service start` or the next login
    hearth service uninstall    ends it and removes the unit file and the log

Settings are those of the settings file alone (.env in a checkout, else ~/.hearth/.env), not of
this shell. They are read at each start.
Exit status 0: it is as asked; 1: it is not, and why is told. Of `status` 0: it runs; 3: it does
not; 4: it is not installed.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hearth.commands.service import foreground
from hearth.commands.service.launchd import Launchd
from hearth.commands.service.service_manager import ServiceState, log_file, refused_mark
from hearth.commands.service.systemd import Systemd
from hearth.commands.take_port import read_pid_file, take_port
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.listen_addresses import url_of
from hearth.shared.models.model_path import why_missing
from hearth.shared.paths import env_file
from hearth.shared.private_files import make_private
from hearth.shared.processes import PID_FILE
from hearth.shared.settings import Settings, load_settings

START_WAIT_S: Final = 20.0  # until the server listens: importing it from a cold disk
ACTIONS: Final = ("install", "start", "stop", "status", "uninstall", "logs", "run")
NOT_RUNNING: Final = 3  # as `systemctl status` ends
NOT_INSTALLED: Final = 4
INSTALL: Final = "Install it: hearth service install"


class Service:
    """The server as this user's service."""

    def __init__(self, system: str, settings_file: Path) -> None:
        """Raises: StartError: this platform, or this user, has no service manager."""
        if os.getuid() == 0 and os.environ.get("SUDO_USER"):
            raise StartError("The service is a user's own: run the same command without sudo.")
        if system not in ("darwin", "linux"):
            raise StartError(f"{system} has neither launchd nor systemd. Start `hearth serve`.")
        directory = settings_file.parent  # relative paths in settings count from there
        self.manager = Launchd(directory) if system == "darwin" else Systemd(directory)
        self._settings_file = settings_file

    def settings(self) -> Settings:
        """Return the settings as the service reads them: nothing of this shell's variables."""
        return load_settings({}, self._settings_file)

    def install(self) -> int:
        settings, hint, unit = self.settings(), self.manager.check(), self.manager.unit_file
        self.refuse_other_server(settings)
        was_there = unit.exists()
        make_private(log_file().parent)
        unit.parent.mkdir(parents=True, exist_ok=True)
        foreground.write_private(unit, self.manager.unit_of())
        try:
            self.manager.load()
        except StartError:
            if not was_there:
                with contextlib.suppress(StartError):
                    self.manager.remove()
            raise
        print(f"{'Upgraded' if was_there else 'Installed'} {unit} for {self.manager.name}. {hint}")
        return self.await_start(settings)

    def start(self) -> int:
        if not self.manager.unit_file.exists():
            raise StartError(f"No service is installed. {INSTALL}")
        state, settings = self.manager.state(), self.settings()
        if state is not None and state.pid is not None:
            print(f"It runs already (pid {state.pid}).")
            return 0
        self.refuse_other_server(settings)
        self.manager.load()
        return self.await_start(settings)

    def stop(self) -> int:
        self.manager.stop()
        print("Stopped.")
        return 0

    def uninstall(self) -> int:
        self.manager.remove()
        for path in (log_file(), foreground.old_log(log_file()), refused_mark()):
            path.unlink(missing_ok=True)
        print(f"Uninstalled; {self._settings_file} and what is kept in ~/.hearth stay.")
        return 0

    def status(self) -> int:
        state = self.manager.state()
        if state is None and not self.manager.unit_file.exists():
            print(f"Service   not installed. {INSTALL}")
            return NOT_INSTALLED
        state = state or ServiceState(None, "")
        print(f"Service   {in_words(state)} by {self.manager.name}")
        print(f"Address   {self.address()}")
        self.tell_missing_model()
        print(f"Last exit {state.last_exit or 'none since it was loaded'}")
        print(f"Unit      {self.manager.unit_file}")
        print(f"Log       {log_file()}")
        return NOT_RUNNING if state.pid is None else 0

    def logs(self, lines: int, *, follows: bool) -> int:
        """Become `tail`, which shows the log."""
        if not log_file().exists():
            raise StartError(f"There is no log at {log_file()}. {INSTALL}")
        arguments = ["-n", str(lines), *(["-F"] if follows else []), str(log_file())]
        os.execvp("tail", ["tail", *arguments])

    def address(self) -> str:
        try:
            settings = self.settings()
        except StartError as error:
            return f"not known: {error}"
        return url_of(settings.proxy_host, settings.proxy_port)

    def tell_missing_model(self) -> None:
        """Print what requests are told while the default model is not on this disk."""
        with contextlib.suppress(StartError):  # `address` tells of it
            if missing := why_missing(self.settings().model_path):
                print(f"Model     {missing}")

    def refuse_other_server(self, settings: Settings) -> None:
        """Raises: StartError: the port is another's, be it a server that was started by hand."""
        state, directory = self.manager.state(), settings.instance_dir
        supervisor, _ = read_pid_file(directory / PID_FILE)
        if state is None or supervisor is None or supervisor.pid != state.pid:
            take_port(settings.proxy_host, settings.proxy_port, directory, is_check=True)

    def await_start(self, settings: Settings) -> int:
        """Say what became of the start; return the exit status."""
        deadline = time.monotonic() + START_WAIT_S
        while time.monotonic() < deadline:
            state = self.manager.state() or ServiceState(None, "")
            supervisor, _ = read_pid_file(settings.instance_dir / PID_FILE)
            if state.pid is not None and supervisor and supervisor.pid == state.pid:
                break
            if state.pid is None and state.last_exit:
                print(f"It did not start: {state.last_exit}. Its log ends with:", file=sys.stderr)
                print(*last_lines(), sep="\n", file=sys.stderr)
                return 1
            time.sleep(0.1)
        print(f"Service   {in_words(state)}, {self.address()}")
        self.tell_missing_model()
        print(f"Log       {log_file()}")
        return 0


def last_lines(count: int = 5) -> list[str]:
    try:
        return log_file().read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        return [f"({error})"]


def in_words(state: ServiceState) -> str:
    if state.pid is not None:
        return f"running (pid {state.pid})"
    return "failed, started again in a moment" if state.will_restart else "stopped"


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help="one of the above")
    parser.add_argument("-n", "--lines", type=int, default=50, help="of the log (50)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    parser.add_argument("--end-with-0-if-refused", action="store_true", help=argparse.SUPPRESS)
    options, others = parser.parse_known_args(arguments)
    if others:
        told = f"no {' '.join(others)}: a service is `hearth serve` alone, and no worker or rank"
        if options.action == "run":  # by an earlier version's unit, which is not to be tried again
            parser.exit(0 if options.end_with_0_if_refused else EXIT_CANNOT_START, f"{told}\n")
        parser.error(told)
    return options


def main(
    arguments: Sequence[str] | None = None,
    system: str = sys.platform,
    settings_file: Path | None = None,
) -> int:
    options = options_of(arguments)
    if options.action == "run":  # as the service manager calls it
        return foreground.run(ends_with_0_if_refused=options.end_with_0_if_refused)
    try:
        service = Service(system, settings_file or env_file())
        if options.action == "logs":
            return service.logs(options.lines, follows=options.follow)
        status: int = getattr(service, options.action)()
    except StartError as error:
        print(f"hearth service: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
