"""Runs a command as the main process of a service, with a log whose size is bounded.

The command and its workers share one open file, to which each of them appends: whoever empties it
has all of them go on at its beginning. So one thread of the main process bounds it for all, and
for what libraries print too.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from hearth.commands.service.service_kinds import become
from hearth.commands.service.service_plan import ServiceHost
from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.make_private_directory import make_private

LOG_BYTES_MAX: Final = 10_000_000  # then a new one is begun, and one old one kept
LOOK_S: Final = 5.0  # between two looks at its size
PIECE_BYTES: Final = 1 << 20  # of one read

log = logging.getLogger(__name__)


def run(host: ServiceHost, arguments: Sequence[str], *, ends_with_0_if_refused: bool) -> int:
    """Become the command of `host.kind`; return its exit status, where it returns.

    launchd restarts what ends with anything but 0, so a start that cannot succeed ends with 0 there
    and leaves a mark for `hearth service status`.
    """
    host.refused_mark.unlink(missing_ok=True)
    if not sys.stderr.isatty():
        ServiceLog(host.log).start()

    def status_of(status: int) -> int:
        if status == EXIT_CANNOT_START and ends_with_0_if_refused:
            host.refused_mark.touch(mode=0o600)
            return 0
        return status

    return become(host.kind, arguments, status_of)


class ServiceLog:
    """The log of this process and its workers, for this user's eyes.

    Invariant: after a look it is at most `bytes_max` long, and so is the old one, but for what is
    written while they are looked at.
    """

    def __init__(self, path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        """Open the file, which is made where it is missing. Raises: OSError."""
        self._path = path
        self._bytes_max = bytes_max
        make_private(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        os.fchmod(self.descriptor, 0o600)  # launchd or systemd may have made it
        self.bound()

    def start(self) -> None:
        """Have this process's output go there, and its workers', and bound it from now on."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(self.descriptor, stream.fileno())
        threading.Thread(target=self._watch, name="service log", daemon=True).start()

    def bound(self) -> None:
        """Keep what the file holds as the old one and empty it, where it is too long.

        What is written between the two is lost; where there is no room for the old one, all is.
        """
        if os.fstat(self.descriptor).st_size <= self._bytes_max:
            return
        old = old_log(self._path)
        try:
            self._copy(old)
        except OSError as error:
            with suppress(OSError):
                old.unlink(missing_ok=True)
            log.warning("the service's log is emptied, and nothing of it kept: %s", error)
        finally:
            os.ftruncate(self.descriptor, 0)

    def _copy(self, target: Path) -> None:
        """Copy the last `bytes_max` bytes into `target`."""
        target.unlink(missing_ok=True)
        at = os.fstat(self.descriptor).st_size - self._bytes_max
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, 0o600), "wb", buffering=0) as file:
            while piece := os.pread(self.descriptor, PIECE_BYTES, at):
                at += file.write(piece)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            try:
                self.bound()
            except OSError as error:  # the next look tries again
                log.warning("the service's log is not bounded: %s", error)


def old_log(log_path: Path) -> Path:
    return log_path.with_name(log_path.name + ".1")
