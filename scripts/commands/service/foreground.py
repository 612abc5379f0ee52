"""Runs the server as the main process of a service, with a log whose size is bounded.

The server and its workers append to one open file, so emptying it has all of them go on at its
beginning. A thread of the server does that for all, and for what libraries print too.
"""

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Final

from hearth.commands import serve
from hearth.commands.service.service_manager import log_file, refused_mark
from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.private_files import make_private

LOG_BYTES_MAX: Final = 10_000_000  # then a new one is begun, and one old one kept
LOOK_S: Final = 5.0  # between two looks at its size

log = logging.getLogger(__name__)


def run(*, ends_with_0_if_refused: bool) -> int:
    """Become the server; return its exit status, where it returns.

    launchd restarts what ends with anything but 0, so a start that cannot succeed ends with 0 there
    and leaves a mark for `hearth service status`.
    """
    refused_mark().unlink(missing_ok=True)
    if not sys.stderr.isatty():
        descriptor = open_log(log_file())
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
        watch = threading.Thread(target=keep_bounded, args=(descriptor, log_file()), daemon=True)
        watch.start()

    def status_of(status: int) -> int:
        if status == EXIT_CANNOT_START and ends_with_0_if_refused:
            refused_mark().touch(mode=0o600)
            return 0
        return status

    return serve.main((), status_of)


def open_log(path: Path) -> int:
    """Return the descriptor of the log, for this user's eyes, and bounded."""
    make_private(path.parent)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # launchd or systemd may have made it
    bound(descriptor, path)
    return descriptor


def keep_bounded(descriptor: int, path: Path) -> None:
    pause = threading.Event()
    while not pause.wait(LOOK_S):
        bound(descriptor, path)


def bound(descriptor: int, path: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Keep the last `bytes_max` bytes as the old log and empty the file, where it is longer.

    What is written between the two is lost; where there is no room for the old one, all is.
    """
    length = os.fstat(descriptor).st_size
    if length <= bytes_max:
        return
    try:
        write_private(old_log(path), os.pread(descriptor, bytes_max, length - bytes_max))
    except OSError as error:
        log.warning("the service's log is emptied, and nothing of it kept: %s", error)
    os.ftruncate(descriptor, 0)


def old_log(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def write_private(path: Path, content: bytes) -> None:
    """Replace `path` as a whole, for its owner only: launchd loads no file of others."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
