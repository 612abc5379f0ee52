"""Remembers the prompts that a worker died with, so that each ends two workers at most.

While it computes, a worker writes whose prompts and answers it is at into a file beside its socket.
Who outlives it counts them in a private directory, one small file each. The first death refuses
nobody, since whose forward it was nobody knows: all that ran are suspects, which from then on run
alone. One that is served so is cleared, one that dies so is refused. A name is a keyed digest of
the API key's root and the tokens: neither a key nor a prompt can be looked for.
"""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import orjson

from hearth.shared.durable_journal import SECRET_BYTES, secret_of
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.private_files import make_private, read_small_file, write_small_file
from hearth.shared.version import VERSION

DIRECTORY: Final = "suspects"  # in KV_CACHE_DIR
SUSPECTED_S: Final = 86_400.0  # after the last death it is as if there had been none
SUSPECTS_MAX: Final = 256  # of more the oldest go
_RECORD_BYTES_MAX: Final = 1 << 20
_SUFFIX: Final = ".suspect"

# read    every prompt that begins with the tokens
# answer  the very prompt, whose answer was written
# idle    work of nobody's, which is not done again
SuspectKind = Literal["read", "answer", "idle"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspect:
    """Tokens that a worker computes, or has died with."""

    name: str  # of the first `length` tokens, hexadecimal
    owner: str  # of the API key, hexadecimal; "" = nobody's
    kind: SuspectKind
    length: int
    tokens: int  # where it was: `length`, or more where an answer was written
    is_alone: bool = False  # it was a suspect before, and nothing else ran
    deaths: int = 0  # 2 = it is refused
    how: str = ""  # the last time
    died_at: float = 0.0  # in seconds of the epoch
    version: str = VERSION  # of Hearth: an upgrade makes it void

    @property
    def is_refused(self) -> bool:
        return self.deaths > 1

    @property
    def until(self) -> float:
        return self.died_at + SUSPECTED_S

    def error(self, text: str = "") -> RequestError:
        """Return what the client of such a request is told; `text` tells of a death just now."""
        if not self.is_refused:
            return WorkerLost(
                f"{text} It ran then: it is retried alone, and refused if it ends that worker too."
            )
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.until))
        where = f"its first {self.length:,} tokens were read"
        if self.kind == "answer":
            where = "it was answered"
        return RequestError(
            "This prompt ended its worker twice, the last time while it ran alone "
            f"({self.how}, while {where}). It is refused until {until}, or until Hearth, MLX or "
            "the model is upgraded; then it is tried again. Change what it says there, lower "
            "PREFILL_CHUNK, or have it tried now: DELETE /v1/cache, then send it again.",
            code="prompt_refused",
        )


class SuspectStore:
    """The suspects of all processes that share a directory. Any thread. It raises nothing.

    Invariant: a file is whole, since it is renamed into its place.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self.secret = secrets.token_bytes(SECRET_BYTES)  # that names are made with
        try:
            make_private(directory)
            self.secret = secret_of(directory, self.secret)
        except OSError as error:
            log.warning("prompts that end a worker cannot be remembered: %s", error)

    def all(self) -> dict[str, Suspect]:
        """Return the suspects by name; a file that says nothing which holds now is removed."""
        try:
            names = os.listdir(self._directory)
        except OSError:  # somebody removed it: nothing is suspected
            return {}
        found = {}
        for path in [self._directory / name for name in names if name.endswith(_SUFFIX)]:
            try:
                row = Suspect(**orjson.loads(read_small_file(path, _RECORD_BYTES_MAX)))
                is_whole = row.tokens >= row.length > 0 < row.deaths and row.name == path.stem
                # A clock that was set back makes none eternal.
                is_now = abs(self._clock() - row.died_at) < SUSPECTED_S
                if is_whole and is_now and row.version == VERSION:
                    found[row.name] = row
                    continue
            except FileNotFoundError:  # another process has removed it
                continue
            except (OSError, ValueError, TypeError) as error:
                log.warning("a suspicion is damaged and forgotten: %s", type(error).__name__)
            _remove(path)
        return found

    def note_death(
        self, running: Mapping[str, Suspect], how: str, *, is_proof: bool = True
    ) -> dict[str, Suspect]:
        """Count a death for all that ran, by request id; return what is known of each now.

        `is_proof`: the worker ended by what ran in it. Else nobody is refused for it.
        """
        known, found = self.all(), {}
        for request_id, row in running.items():
            before = known[row.name].deaths if row.name in known else 0
            deaths = max(before, 2 if row.is_alone and is_proof else 1)
            now = replace(row, deaths=deaths, how=how, died_at=self._clock())
            found[request_id] = now
            log.warning(
                "suspect request=%s amid=%s tokens=%d alone=%d refused=%d: %s",
                *(request_id or "none", row.kind, row.tokens, row.is_alone, now.is_refused, how),
            )
            try:
                write_small_file(self._directory / f"{row.name}{_SUFFIX}", orjson.dumps(now))
            except OSError as error:
                log.error("the suspicion cannot be kept, it may end the next worker: %s", error)
        rows = sorted(self.all().values(), key=lambda row: row.died_at)
        self.drop(rows[:-SUSPECTS_MAX])
        return found

    def drop(self, suspects: Iterable[Suspect]) -> None:
        for row in suspects:
            _remove(self._directory / f"{row.name}{_SUFFIX}")


def running_path(socket_path: Path) -> Path:
    """Return where the worker of this socket writes what it computes."""
    return socket_path.with_suffix(".running")


def take_running(socket_path: Path) -> dict[str, Suspect]:
    """Return what a worker computed as it ended, by request id, and remove it."""
    path, found = running_path(socket_path), {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        told = orjson.loads(read_small_file(path, _RECORD_BYTES_MAX).partition(b"\n")[0])
        found = {request_id: Suspect(**row) for request_id, row in told.items()}
    path.unlink(missing_ok=True)
    return found


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
