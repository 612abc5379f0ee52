"""Names the file beside a worker's socket that tells other workers what its weights take."""

import contextlib
from pathlib import Path
from typing import Final

WEIGHTS_SUFFIX: Final = ".weights"


def weights_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(WEIGHTS_SUFFIX)


def remove_claims(directory: Path) -> None:
    """Remove the files of all workers in `directory`: none of them lives."""
    for path in directory.glob(f"*{WEIGHTS_SUFFIX}"):
        with contextlib.suppress(OSError):  # a directory: it says nothing
            path.unlink(missing_ok=True)
