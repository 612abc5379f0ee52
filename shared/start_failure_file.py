"""Passes on why a worker cannot start: it leaves a line in a file beside its socket."""

import logging
from pathlib import Path
from typing import Final

from hearth.shared.read_small_file import read_small_file
from hearth.shared.write_small_file import write_small_file

log = logging.getLogger(__name__)

REASON_CHARS_MAX: Final = 2_000
_BYTES_MAX: Final = 1 << 20


def reason_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(".reason")


def leave_reason(endpoint: str, text: str) -> None:
    """Leave `text` for the supervisor, whose socket is at `endpoint`; log where it cannot be."""
    path = reason_path(Path(endpoint.removeprefix("ipc://")))
    try:
        write_small_file(path, text.encode(errors="replace"))
    except OSError as error:
        log.warning("the supervisor is not told why: %s", error)


def take_reason(socket_path: Path) -> str:
    """Return what the worker left, and remove it; nothing where it left nothing."""
    path = reason_path(socket_path)
    try:
        text = read_small_file(path, _BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    path.unlink(missing_ok=True)
    return text[:REASON_CHARS_MAX]
