"""Remembers the prompts that a worker died with, in a private directory of small files.

A suspicion is a file of its own, named by the tokens that are suspected. The supervisor writes one
after a death; a worker looks for one before each request, and removes it when the request was
served. Names are digests keyed by a secret beside the files, so that neither an API key nor a
prompt can be looked for in them, and of this version of Hearth: an upgrade makes all of them void,
as the root of the tokens' names does for a change of the model or of MLX.
"""

import contextlib
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hearth.shared.errors import RequestError
from hearth.shared.make_private_directory import make_private
from hearth.shared.suspects.forward_record import NAME_BYTES, ForwardKind
from hearth.shared.version import VERSION

DIRECTORY: Final = "suspects"  # in KV_CACHE_DIR
SUSPECTED_S: Final = 86_400.0  # after the last death it is as if there had been none
SUSPECTS_MAX: Final = 256  # of more the oldest goes
FILE_BYTES_MAX: Final = 4_096
_SUFFIX: Final = ".suspect"
_SECRET_NAME: Final = ".secret"
_SECRET_BYTES: Final = 32
_TEMP_PREFIX: Final = ".writing-"

# suspect  read alone and in small forwards; served so, it is on trial
# trial    read alone, in forwards as long as anybody's; served so, it is cleared
# small    died at its trial: read in small forwards, beside others, for as long as it is known
SuspectStage = Literal["suspect", "trial", "small"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is known of tokens that a worker died with. It holds no word of a prompt."""

    name: str  # of the first `length` tokens, hexadecimal
    owner: str  # of the API key, hexadecimal
    kind: ForwardKind  # of the forward that ran
    length: int
    tokens: int  # how far the sequence was: `length`, or more where it decoded
    deaths: int
    lone_deaths: int  # of these, while it was retried alone
    died_at: float  # the last time, in seconds of the epoch
    how: str  # the last time
    is_refused: bool
    stage: SuspectStage = "suspect"
    version: str = VERSION

    @property
    def until(self) -> float:
        return self.died_at + SUSPECTED_S

    def refusal(self) -> RequestError:
        """Return what is told to a request that has these tokens, once they are refused."""
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.until))
        where = f"while its first {self.length:,} tokens were read"
        if self.kind == "decode":
            where = f"while it was answered, at token {self.tokens:,}"
        return RequestError(
            f"This prompt ended its worker {self.deaths} times, the last time while it ran alone "
            f"({self.how}, {where}). It is refused until {until}, or until Hearth, MLX or the "
            "model is upgraded; then it is tried again. Change what it says there, lower "
            "PREFILL_CHUNK, or have it tried now: DELETE /v1/cache, then send it again.",
            code="prompt_refused",
        )


class SuspectStore:
    """The suspicions of all processes that share a directory. Any thread.

    Invariant: a file is whole, since it is renamed into its place.
    """

    def __init__(
        self, directory: Path, clock: Callable[[], float] = time.time, cut_label: str = ""
    ) -> None:
        """`cut_label` names the rule of forwards: what died under another is tried again.

        Raises: OSError: the directory cannot be made, or its secret not read.
        """
        make_private(directory)
        # Kept for one key: digests of prompts that workers died with, 24 hours
        self._directory = directory
        self._clock = clock
        self._cut_label = cut_label
        self._secret = _secret(directory / _SECRET_NAME)

    def named(self, what: bytes, kind: str = "") -> bytes:
        """Return what `what` is known by here, as the subject of a `kind` of suspicion."""
        person = kind.encode()[:16]
        digest = blake2b(what, key=self._secret, digest_size=NAME_BYTES, person=person)
        digest.update(f"{VERSION} {self._cut_label}".encode())
        return digest.digest()

    def all(self) -> Mapping[str, Suspicion]:
        """Return the suspicions that hold, by name; what holds no more is removed."""
        found: dict[str, Suspicion] = {}
        for path in self._paths():
            suspicion = self._read(path)
            if suspicion is not None and path.stem == suspicion.name:
                found[suspicion.name] = suspicion
            else:
                _remove(path)
        return found

    def holds(self, suspicion: Suspicion) -> bool:
        """Whether a suspicion that was found before still is there."""
        return self._path(suspicion.name).exists()

    def save(self, suspicion: Suspicion) -> None:
        """Keep a suspicion in the place of one of its name. Raises: OSError."""
        make_private(self._directory)
        handle, temp = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=self._directory)  # 0600
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(suspicion), file)
            os.replace(temp, self._path(suspicion.name))
        except BaseException:
            _remove(Path(temp))
            raise
        self._keep_newest()

    def drop(self, suspicion: Suspicion) -> None:
        _remove(self._path(suspicion.name))

    def clear(self, owner: str = "") -> int:
        """Drop the suspicions of `owner`, "" = everyone's; return how many."""
        dropped = [row for row in self.all().values() if owner in ("", row.owner)]
        for suspicion in dropped:
            self.drop(suspicion)
        return len(dropped)

    def _keep_newest(self) -> None:
        rows = sorted(self.all().values(), key=lambda row: row.died_at)
        for suspicion in rows[: max(0, len(rows) - SUSPECTS_MAX)]:
            self.drop(suspicion)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{_SUFFIX}"

    def _paths(self) -> list[Path]:
        try:
            names = os.listdir(self._directory)
        except OSError:  # somebody removed it: nothing is suspected
            return []
        return [self._directory / name for name in names if name.endswith(_SUFFIX)]

    def _read(self, path: Path) -> Suspicion | None:
        """Return what a file says; None where it says nothing that holds now."""
        try:
            suspicion = _suspicion(json.loads(_bytes_of(path)))
        except FileNotFoundError:  # another process has removed it
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("a suspicion is damaged and forgotten: %s", type(error).__name__)
            return None
        age_s = self._clock() - suspicion.died_at
        is_now = -SUSPECTED_S < age_s < SUSPECTED_S  # a clock that was set back makes none eternal
        return suspicion if is_now and suspicion.version == VERSION else None


def open_store(kv_cache_dir: Path, cut_label: str = "") -> SuspectStore | None:
    """Return the store of a cache directory; None, with a warning, where it is of no use."""
    try:
        return SuspectStore(kv_cache_dir / DIRECTORY, cut_label=cut_label)
    except OSError as error:
        log.warning("prompts that end a worker cannot be remembered: %s", error)
        return None


def _suspicion(row: Any) -> Suspicion:
    """Return the suspicion that was written. Raises: ValueError."""
    kinds = {field.name: field.type for field in fields(Suspicion)}
    if not isinstance(row, dict) or set(row) != set(kinds):
        raise ValueError("these are not the fields of a suspicion")
    if row["kind"] not in get_args(ForwardKind) or row["stage"] not in get_args(SuspectStage):
        raise ValueError(f"no forward is a {row['kind']!r:.40}, or no stage {row['stage']!r:.40}")
    for name, value in row.items():
        kind = kinds[name]
        if isinstance(kind, type) and type(value) is not kind:
            raise ValueError(f"{name} is a {type(value).__name__}")
    if not 0 < row["length"] <= row["tokens"]:
        raise ValueError(f"{row['length']} tokens of {row['tokens']} are none")
    return Suspicion(**row)


def _bytes_of(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(handle, FILE_BYTES_MAX)
    finally:
        os.close(handle)


def _secret(path: Path) -> bytes:
    """Return the secret at `path`, made where there is none. Raises: OSError."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            found = _bytes_of(path)
            if len(found) == _SECRET_BYTES:
                return found
            log.warning("the secret of suspicions is damaged: what was suspected is forgotten")
            _remove(path)
        handle, temp = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)  # 0600
        try:
            os.write(handle, secrets.token_bytes(_SECRET_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(temp, path)
        finally:
            os.close(handle)
            _remove(Path(temp))
    return _bytes_of(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
