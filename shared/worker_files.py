"""Defines the files that a worker leaves beside its socket for its supervisor and other workers.

A message on the socket may be lost when the worker dies; a file is not.
"""

import contextlib
import logging
from pathlib import Path
from typing import Final

from hearth.shared.private_files import read_small_file, write_small_file

log = logging.getLogger(__name__)

REASON_CHARS_MAX: Final = 2_000
_BYTES_MAX: Final = 1 << 20


def reason_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(".reason")


def leave_reason(endpoint: str, text: str) -> None:
    """Write why this worker ends, for the supervisor that reaches it at `endpoint`."""
    path = reason_path(Path(endpoint.removeprefix("ipc://")))
    try:
        write_small_file(path, text.encode(errors="replace"))
    except OSError as error:
        log.warning("the supervisor is not told why: %s", error)


def take_reason(socket_path: Path) -> str:
    """Return the reason that the worker left, and remove its file; "" if there is none."""
    path = reason_path(socket_path)
    try:
        text = read_small_file(path, _BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    path.unlink(missing_ok=True)
    return text[:REASON_CHARS_MAX]


WEIGHTS_SUFFIX: Final = ".weights"


def weights_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(WEIGHTS_SUFFIX)


def remove_claims(directory: Path) -> None:
    """Remove the weight claims of all workers in `directory`; none of the workers may be alive."""
    for path in directory.glob(f"*{WEIGHTS_SUFFIX}"):
        with contextlib.suppress(OSError):  # a directory is no claim
            path.unlink(missing_ok=True)


def forwarded_path(endpoint: str) -> Path:
    """Return the file in which the worker at `endpoint` (ipc://) names the request it computes."""
    return Path(endpoint.removeprefix("ipc://")).with_suffix(".forwarded")
