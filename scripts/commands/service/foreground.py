"""Runs the server as the main process of a service, with a log that is bounded at each start."""

import os
import sys
from pathlib import Path
from typing import Final

from hearth.commands import serve
from hearth.commands.service.service_plan import ServiceHost
from hearth.shared.errors import EXIT_CANNOT_START
from hearth.shared.make_private_directory import make_private

LOG_BYTES_MAX: Final = 10_000_000  # then a start begins a new one, and keeps one old one


def run(host: ServiceHost, *, ends_with_0_if_refused: bool) -> int:
    """Become the server; returns only where it does not start.

    launchd restarts what ends with anything but 0, so a start that cannot succeed ends with 0 there
    and leaves a mark for `hearth service status`.
    """
    host.refused_mark.unlink(missing_ok=True)
    if not sys.stderr.isatty():
        open_log(host.log)

    def status_of(status: int) -> int:
        if status == EXIT_CANNOT_START and ends_with_0_if_refused:
            host.refused_mark.touch(mode=0o600)
            return 0
        return status

    return serve.main([], status_of)


def open_log(log: Path) -> None:
    """Append this process's output, and that of its workers, to `log`, for this user's eyes."""
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(old_log(log))
    make_private(log.parent)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def old_log(log: Path) -> Path:
    return log.with_name(log.name + ".1")
