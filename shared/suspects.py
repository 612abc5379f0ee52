"""Remembers the prompts that a worker died with, so that each prompt ends two workers at most.

A worker writes the prompts and answers that it computes into a file beside its socket. If the
worker dies, its supervisor records them as suspects in a private directory, one small file each.
After the first death no request is refused, because the guilty forward is unknown: all requests
that ran become suspects, and suspects run alone from then on. A suspect is cleared if it is served,
and refused if it ran alone when its worker died. A suspect's name is a keyed digest
of the API key's root and the tokens, so that the file reveals neither a key nor a prompt.
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
SUSPECTED_S: Final = 86_400.0  # time from the last death until the suspect is forgotten
SUSPECTS_MAX: Final = 256  # beyond this the oldest suspects are removed
_RECORD_BYTES_MAX: Final = 1 << 20
_SUFFIX: Final = ".suspect"

# read    the worker read these tokens: suspects every prompt that begins with them
# answer  the worker wrote an answer to these tokens: suspects this prompt alone
# idle    the worker did idle work for no request: the work is not repeated
SuspectKind = Literal["read", "answer", "idle"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspect:
    """Tokens that a worker computes, or has died with."""

    name: str  # digest of the first `length` tokens, hexadecimal
    owner: str  # digest of the API key, hexadecimal; "" = idle work
    kind: SuspectKind
    length: int
    tokens: int  # position reached: `length`, or more where an answer was written
    is_alone: bool = False  # whether it was a suspect already and nothing else ran
    deaths: int = 0  # 2 = the request is refused
    how: str = ""  # how the worker ended the last time
    died_at: float = 0.0  # seconds since the epoch
    version: str = VERSION  # version of Hearth; an upgrade voids the suspicion

    @property
    def is_refused(self) -> bool:
        return self.deaths > 1

    @property
    def expires_at(self) -> float:
        return self.died_at + SUSPECTED_S

    def error(self, text: str = "") -> RequestError:
        """Return the error for the client of this request; `text` describes a new death."""
        if not self.is_refused:
            return WorkerLost(
                f"{text} It ran then: it is retried alone, and refused if it ends that worker too."
            )
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.expires_at))
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
    """Keeps the suspects of all processes that share a directory. Any thread. Raises nothing.

    Invariant: each file is complete, because it is renamed into place.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock
        self.secret = secrets.token_bytes(SECRET_BYTES)  # key of the names' digests
        try:
            make_private(directory)
            self.secret = secret_of(directory, self.secret)
        except OSError as error:
            log.warning("prompts that end a worker cannot be remembered: %s", error)

    def all(self) -> dict[str, Suspect]:
        """Return the current suspects by name; remove damaged and outdated files."""
        try:
            names = os.listdir(self._directory)
        except OSError:  # the directory was removed: nothing is suspected
            return {}
        found = {}
        for path in [self._directory / name for name in names if name.endswith(_SUFFIX)]:
            try:
                suspect = Suspect(**orjson.loads(read_small_file(path, _RECORD_BYTES_MAX)))
                is_whole = (
                    suspect.tokens >= suspect.length > 0 < suspect.deaths
                    and suspect.name == path.stem
                )
                # abs(): a clock that was set back must not make a suspect eternal.
                is_current = abs(self._clock() - suspect.died_at) < SUSPECTED_S
                if is_whole and is_current and suspect.version == VERSION:
                    found[suspect.name] = suspect
                    continue
            except FileNotFoundError:  # another process removed the file
                continue
            except (OSError, ValueError, TypeError) as error:
                log.warning("a suspicion is damaged and forgotten: %s", type(error).__name__)
            _remove(path)
        return found

    def record_death(
        self, running: Mapping[str, Suspect], how: str, *, is_proof: bool = True
    ) -> dict[str, Suspect]:
        """Count a worker's death for all that ran in it; return the updated suspects.

        Both mappings are by request id. `is_proof` says that the work itself ended the worker;
        without proof no request is refused because of this death.
        """
        known, found = self.all(), {}
        for request_id, suspect in running.items():
            earlier_deaths = known[suspect.name].deaths if suspect.name in known else 0
            deaths = max(earlier_deaths, 2 if suspect.is_alone and is_proof else 1)
            updated = replace(suspect, deaths=deaths, how=how, died_at=self._clock())
            found[request_id] = updated
            log.warning(
                "suspect request=%s amid=%s tokens=%d alone=%d refused=%d: %s",
                *(
                    request_id or "none",
                    suspect.kind,
                    suspect.tokens,
                    suspect.is_alone,
                    updated.is_refused,
                    how,
                ),
            )
            try:
                write_small_file(
                    self._directory / f"{suspect.name}{_SUFFIX}", orjson.dumps(updated)
                )
            except OSError as error:
                log.error("the suspicion cannot be kept, it may end the next worker: %s", error)
        oldest_first = sorted(self.all().values(), key=lambda suspect: suspect.died_at)
        self.drop(oldest_first[:-SUSPECTS_MAX])
        return found

    def drop(self, suspects: Iterable[Suspect]) -> None:
        for suspect in suspects:
            _remove(self._directory / f"{suspect.name}{_SUFFIX}")


def running_path(socket_path: Path) -> Path:
    """Return the file in which the worker of this socket lists what it computes."""
    return socket_path.with_suffix(".running")


def take_running(socket_path: Path) -> dict[str, Suspect]:
    """Return what a worker computed as it ended, by request id, and remove its file."""
    path, found = running_path(socket_path), {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        entries = orjson.loads(read_small_file(path, _RECORD_BYTES_MAX).partition(b"\n")[0])
        found = {request_id: Suspect(**fields) for request_id, fields in entries.items()}
    path.unlink(missing_ok=True)
    return found


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
