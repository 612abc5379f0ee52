"""Divides the machine's memory among the workers of one server, by what each one's model needs.

Each worker leaves the bytes of its weights in a file beside its socket, and reads those of the
others. The server's directory is private to its user; its supervisor removes the files.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from hearth.shared.weights_file import WEIGHTS_SUFFIX, weights_path

_IPC: Final = "ipc://"
_DIGITS_MAX: Final = 20


class MemoryShare:
    """One worker's part of `total` bytes: its own weights, and an equal part of what none takes.

    Invariant: the parts of all workers are `total` together, once each has read the others' files.
    A worker that is started by hand, on tcp://, has its machine to itself.
    Owner: the inference thread.
    """

    def __init__(self, endpoint: str, total: int, workers: int) -> None:
        self._path = weights_path(Path(endpoint.removeprefix(_IPC)))
        self._is_alone = workers == 1 or not endpoint.startswith(_IPC)
        self._workers = 1 if self._is_alone else workers
        self._total = total
        self.own_bytes = 0  # of weights
        self.others_bytes = 0
        self.refresh()

    def claim(self, nbytes: int) -> None:
        """Tell the others what this worker's weights take, before they are read."""
        assert nbytes >= 0, nbytes
        self.own_bytes = nbytes
        if not self._is_alone:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(str(nbytes))
        self.refresh()

    def refresh(self) -> None:
        """Read what the other workers claim."""
        if not self._is_alone:
            files = self._path.parent.glob(f"*{WEIGHTS_SUFFIX}")
            self.others_bytes = sum(_claim(path) for path in files if path != self._path)

    def give_up(self) -> None:
        """Claim nothing any more: the weights are gone."""
        self.own_bytes = 0
        if not self._is_alone:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    @property
    def total(self) -> int:
        """The bytes that all workers may take."""
        return self._total

    @property
    def limit(self) -> int:
        """The bytes that this worker may take, weights included."""
        left = self._total - self.own_bytes - self.others_bytes
        return self.own_bytes + max(0, left) // self._workers


def _claim(path: Path) -> int:
    """Return what one file says; nothing where it is gone, or is being written."""
    try:
        text = path.read_text()[:_DIGITS_MAX]
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isascii() and text.isdigit() else 0
