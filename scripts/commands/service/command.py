"""Installs, starts, stops and shows the server as a service of this user: launchd, systemd.

    hearth service install      starts it now and at each login; over one that runs: an upgrade
    hearth service status       says whether it runs, where, and how it ended last
    hearth service logs -f      shows the end of its log, and what comes
    hearth service stop         ends it until `hearth service start` or the next login
    hearth service uninstall    ends it and removes the unit file and the log

    hearth service install worker tcp://0.0.0.0:5555      `hearth worker`, beside the server
    hearth service install ranks join 192.168.2.1         `hearth ranks join`, beside it
    hearth service status worker                          serve, worker or ranks: whose it is;
                                                          else of the only one, or the server's

Settings are those of the settings file alone (.env in a checkout, else ~/.hearth/.env), not of
this shell. They are read at each start.
Exit status 0: it is as asked; 1: it is not, and why is told. Of `status` 0: it runs; 3: it does
not; 4: it is not installed.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from hearth.commands.service import foreground
from hearth.commands.service.launchd import Launchd, guarded_folder
from hearth.commands.service.service_kinds import KINDS, SERVER, START, ServedPort, ServiceKind
from hearth.commands.service.service_manager import ServiceManager, ServiceState, write_private
from hearth.commands.service.service_plan import ServiceHost, ServicePlan, plan_of, this_host
from hearth.commands.service.systemd import Systemd
from hearth.shared.errors import StartError
from hearth.shared.make_private_directory import make_private
from hearth.shared.settings_from_env import Settings
from hearth.shared.stop_times import FLUSH_WAIT_S

START_WAIT_S: Final = 20.0  # until the server listens: importing it from a cold disk
POLL_S: Final = 0.1
LINES: Final = 50
NOT_RUNNING: Final = 3  # as `systemctl status` ends
NOT_INSTALLED: Final = 4
INSTALL: Final = "hearth service install"


def manager_of(host: ServiceHost) -> ServiceManager:
    """Raises: StartError: this platform, or this user, has no service manager that is known."""
    if host.uid == 0 and host.environ.get("SUDO_USER"):
        raise StartError("The service is a user's own: run the same command without sudo.")
    if host.system == "darwin":
        return Launchd(host)
    if host.system == "linux":
        return Systemd(host)
    raise StartError(
        f"{host.system} has neither launchd nor systemd. Start `hearth {host.kind.command}` by "
        "hand."
    )


class Service:
    """One user's service of one kind: its manager, its settings, its files."""

    def __init__(self, host: ServiceHost, given: Sequence[str] = ()) -> None:
        """`given` are the arguments of its kind's command, where it is to be installed."""
        self.host = host
        self.manager = manager_of(host)
        self._given = tuple(given)

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Those that are given, else those of the unit file. Raises: StartError: it is damaged."""
        is_renewed = self.host.kind != SERVER and self.manager.unit_file.exists()
        return self.manager.arguments() if is_renewed and not self._given else self._given

    @functools.cached_property
    def needs(self) -> ServedPort:
        """What its start depends on. Raises: StartError: the arguments are no good."""
        return START[self.host.kind](self.host.settings_file, self.arguments)

    def settings(self) -> Settings:
        return self.needs.settings()

    def plan(self, settings: Settings) -> ServicePlan:
        return plan_of(self.host, FLUSH_WAIT_S, self.arguments)

    @property
    def install_command(self) -> str:
        """Return how the user installs it."""
        if self.host.kind == SERVER:
            return INSTALL
        return f"{INSTALL} {self.host.kind.command}"

    def install(self) -> int:
        settings = self.settings()
        hints = [self.manager.check(), self.about_shell(), self.about_folder()]
        self.refuse_other_server(settings)
        plan = self.plan(settings)
        unit = self.manager.unit_file
        was_there = unit.exists()
        make_private(plan.log.parent)
        unit.parent.mkdir(parents=True, exist_ok=True)
        write_private(unit, self.manager.unit_of(plan))
        try:
            self.manager.load()
        except StartError:
            if not was_there:
                with contextlib.suppress(StartError):
                    self.manager.remove()
            raise
        print(f"{'Upgraded' if was_there else 'Installed'} {unit} for {self.manager.name}.")
        print(*filter(None, hints), sep="\n", end="\n" if any(hints) else "")
        return self.await_start(settings)

    def start(self) -> int:
        if not self.manager.unit_file.exists():
            raise StartError(f"No service is installed. Install it: {self.install_command}")
        settings = self.settings()
        self.manager.check()
        if (pid := self.manager.state().pid) is not None:
            print(f"It runs already (pid {pid}).")
            return 0
        self.refuse_other_server(settings)
        self.manager.load()
        return self.await_start(settings)

    def stop(self) -> int:
        pid = self.manager.state().pid
        self.manager.stop()
        print("It did not run." if pid is None else f"Stopped (pid {pid}).")
        return 0

    def uninstall(self) -> int:
        was_there = self.manager.unit_file.exists() or self.manager.state().is_loaded
        self.manager.remove()
        log = self.host.log
        for path in (log, foreground.old_log(log), self.host.refused_mark):
            path.unlink(missing_ok=True)
        if not was_there:
            print("No service was installed.")
            return 0
        print(f"Uninstalled; {self.host.settings_file} and what is kept in ~/.hearth stay.")
        return 0

    def status(self) -> int:
        state = self.manager.state()
        is_installed = self.manager.unit_file.exists()
        if not is_installed and not state.is_loaded:
            print(f"Service   not installed. Install it: {self.install_command}")
            return NOT_INSTALLED
        print(f"Service   {self.name}{in_words(state)} by {self.manager.name}")
        for title, text in (
            ("Address", self.about_address(state)),
            ("Last exit", state.last_exit or "none since it was loaded"),
            ("Unit", str(self.manager.unit_file)),
            ("Log", str(self.host.log)),
            ("Note", self.about_unit()),
        ):
            if text:
                print(f"{title:9} {text}")
        return NOT_RUNNING if state.pid is None else 0

    def logs(self, lines: int, *, follows: bool) -> int:
        """Become `tail`, which shows the log."""
        if not self.host.log.exists():
            raise StartError(
                f"There is no log at {self.host.log}. Install the service: {self.install_command}"
            )
        sys.stdout.flush()
        arguments = ["-n", str(lines), *(["-F"] if follows else []), str(self.host.log)]
        os.execvp("tail", ["tail", *arguments])

    def refuse_other_server(self, settings: Settings) -> None:
        """Raises: StartError: the port is another's, be it a server that was started by hand."""
        supervisor = self.needs.supervisor_pid(settings)
        if supervisor is not None and supervisor == self.manager.state().pid:
            return
        try:
            self.needs.check_port(settings)
        except StartError as error:
            by_hand = " It was started by hand, not by the service." if supervisor else ""
            raise StartError(f"{error}{by_hand} Then run the same command again.") from None

    def await_start(self, settings: Settings) -> int:
        """Say what became of the start; return the exit status."""
        deadline = time.monotonic() + START_WAIT_S
        state = self.manager.state()
        while not (self.is_up(state, settings) or state.last_exit) and (
            time.monotonic() < deadline
        ):
            time.sleep(POLL_S)
            state = self.manager.state()
        if state.last_exit and not self.is_up(state, settings):
            print(f"It did not start: {state.last_exit}. Its log ends with:", file=sys.stderr)
            print(*last_lines(self.host), sep="\n", file=sys.stderr)
            return 1
        where = self.about_address(state)
        print(f"Service   {self.name}{in_words(state)}{f', {where}' if where else ''}")
        print(f"Log       {self.host.log}")
        return 0

    def about_address(self, state: ServiceState) -> str:
        if state.pid is None:
            return ""
        try:
            settings = self.settings()
        except StartError as error:
            return f"not known: {error}"
        address = self.needs.address(settings)
        if not address or self.is_up(state, settings):
            return address
        return f"not {address} yet, or another since the settings changed"

    def about_unit(self) -> str:
        """Return what is to be done where the unit file is not what an install would write."""
        with contextlib.suppress(StartError):
            unit = self.manager.unit_file
            if not unit.exists() or unit.read_bytes() != self.manager.unit_of(
                self.plan(self.settings())
            ):
                return (
                    "the unit file is not what an install would write now. Renew it: "
                    f"{self.install_command}"
                )
        return ""

    @property
    def name(self) -> str:
        """Return what tells it from the server, before what is said of it."""
        return "" if self.host.kind == SERVER else f"{self.host.kind.command}: "

    def is_up(self, state: ServiceState, settings: Settings) -> bool:
        return state.pid is not None and self.needs.is_up(state.pid, settings)

    def about_shell(self) -> str:
        """Return a hint where settings are out of the service's sight: in this shell."""
        host = self.host
        names = [row.metadata["name"] for row in dataclasses.fields(Settings)]
        unseen = [name for name in names if name in host.environ]
        return (
            f"The service does not see {', '.join(unseen)}. Set what it is to have in "
            f"{host.settings_file}."
            if unseen
            else ""
        )

    def about_folder(self) -> str:
        directory = self.host.settings_file.parent
        folder = guarded_folder(self.host.home, directory) if self.host.system == "darwin" else ""
        return (
            f"{directory} is in {folder}, which macOS guards: allow Python where it asks, or move "
            "this directory if the service ends with `Operation not permitted`."
            if folder
            else ""
        )


def in_words(state: ServiceState) -> str:
    if state.pid is not None:
        return f"running (pid {state.pid})"
    return "failed, started again in a moment" if state.will_restart else "stopped"


def last_lines(host: ServiceHost, count: int = 5) -> list[str]:
    try:
        return host.log.read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        return [f"({error})"]


def installed_kind(host: ServiceHost) -> ServiceKind:
    """Return the kind of the only service that is installed, else the server's."""
    hosts = [dataclasses.replace(host, kind=kind) for kind in KINDS.values()]
    found = [each.kind for each in hosts if manager_of(each).unit_file.exists()]
    return found[0] if len(found) == 1 else SERVER


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser
    for name in ("install", "run"):  # the service manager calls `run`
        each = add(name)
        each.add_argument("--end-with-0-if-refused", action="store_true", help=argparse.SUPPRESS)
        each.add_argument(
            "what", nargs="?", choices=KINDS, default=SERVER.command, help="default: serve"
        )
        each.add_argument("arguments", nargs=argparse.REMAINDER, help="of that command")
    for name in ("start", "stop", "status", "uninstall", "logs"):
        each = add(name)
        each.add_argument("what", nargs="?", choices=KINDS, help="default: the one there is")
        each.set_defaults(arguments=())
    each.add_argument("-n", "--lines", type=int, default=LINES, help="lines to begin with (50)")
    each.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, host: ServiceHost | None = None) -> int:
    options = options_of(arguments)
    host = host or this_host()
    if options.action == "run":
        host = dataclasses.replace(host, kind=KINDS[options.what])
        return foreground.run(
            host, options.arguments, ends_with_0_if_refused=options.end_with_0_if_refused
        )
    try:
        kind = KINDS[options.what] if options.what else installed_kind(host)
        service = Service(dataclasses.replace(host, kind=kind), options.arguments)
        if options.action == "logs":
            return service.logs(options.lines, follows=options.follow)
        status: int = getattr(service, options.action)()
    except StartError as error:
        print(f"hearth service: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
