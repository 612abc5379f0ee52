"""Divides the machine's memory among the workers of one server, by what each one's model needs.

Each worker leaves, in a file beside its socket, the bytes of its weights and the limit that it
holds itself to, and reads those of the others. The server's directory is private to its user; its
supervisor removes the files.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from hearth.shared.private_files import read_small_file
from hearth.shared.worker_files import WEIGHTS_SUFFIX, weights_path

_IPC: Final = "ipc://"
_LOCK_TRIES: Final = 50
_LOCK_WAIT_S: Final = 0.001
_BYTES_MAX: Final = 64


class _Claim(NamedTuple):
    weight_bytes: int
    limit: int


class MemoryShare:
    """One worker's part of `total` bytes: its own weights, and an equal part of what none takes.

    Invariant: the limits of all workers are never more than `total` together. One that needs more
    waits until the others, which look every now and then, hold themselves to less.
    Owner: the inference thread.
    """

    def __init__(
        self, endpoint: str, total: int, workers: int, hold: Callable[[int], None]
    ) -> None:
        """`hold` is told each new limit, before the other workers can see it."""
        self._path = weights_path(Path(endpoint.removeprefix(_IPC)))
        self._workers = workers
        self.total = total  # bytes that all workers may take
        self.own_bytes = 0  # of weights
        self._others: list[_Claim] = []
        self._hold = hold
        self._told = -1  # the limit that `hold` was told last
        self.limit = self._fair(0)  # bytes that this worker may take, weights included

    @property
    def others_bytes(self) -> int:
        """What the other workers' weights take."""
        return sum(claim.weight_bytes for claim in self._others)

    @property
    def expected_limit(self) -> int:
        """The limit once all workers have loaded: those that have not, this one's model too.

        Where that does not fit, they will not.
        """
        missing = self._workers - 1 - len(self._others)
        others = self.others_bytes + missing * self.own_bytes
        return self._fair(others) if self.own_bytes + others <= self.total else self.limit

    def claim(self, nbytes: int) -> None:
        """Tell the others what this worker's weights take, before they are read."""
        assert nbytes >= 0, nbytes
        self.own_bytes = nbytes
        self.refresh()

    def refresh(self) -> None:
        """Read what the other workers hold, and tell them what this one may."""
        if self._workers == 1:
            self._decide()
            return
        with self._lock():
            self.look()
            self._decide()
            # In place: it takes no room of a disk that is full.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{self.own_bytes} {self.limit}")

    def look(self) -> None:
        """Read what the other workers hold, and tell them nothing."""
        if self._workers > 1:
            files = self._path.parent.glob(f"*{WEIGHTS_SUFFIX}")
            found = (_claim(path) for path in files if path != self._path)
            self._others = [claim for claim in found if claim is not None]

    def give_up(self) -> None:
        """Claim nothing any more: the weights are gone, or do not come."""
        self.own_bytes = 0
        if self._workers > 1:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _decide(self) -> None:
        held = sum(claim.limit for claim in self._others)
        self.limit = max(0, min(self._fair(self.others_bytes), self.total - held))
        if self.limit != self._told:
            self._told = self.limit
            self._hold(self.limit)

    def _fair(self, others: int) -> int:
        return fair_limit(self.total, self.own_bytes, others, self._workers)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the workers' lock, for microseconds: two that look at once would both take a rest.

        It is on the directory, and ends with the process that holds it. One that was stopped amid
        its look holds up nobody for long.
        """
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(_LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOCK_WAIT_S)
            yield
        finally:
            os.close(descriptor)


def fair_limit(total: int, own: int, others: int, workers: int) -> int:
    """Return the limit of one of so many workers: its weights, and an equal part of what is left.

    `own` and `others` are the bytes of its weights and of theirs.
    """
    return own + max(0, total - own - others) // workers


def _claim(path: Path) -> _Claim | None:
    """Return what one file says; None where it is gone, or says nothing."""
    try:
        words = read_small_file(path, _BYTES_MAX).decode("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return _Claim(*map(int, words))
