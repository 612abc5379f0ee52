"""Keeps the answers of a run in a file, for a run with other settings to compare with.

The file has the answers and digests of the requests, not the prompts. Only its owner can read it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.accuracy.answer_changes import Reply
from hearth.commands.server_client import ProbeError, Row

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What a run found: each request's digest, the replies of each pass."""

    digests: Mapping[str, str]  # by the question's id
    passes: Mapping[str, Mapping[str, Reply]]  # by the pass, then by the question's id


def digest_of(body: Row) -> str:
    """Return what tells the requests of two runs apart."""
    text = json.dumps(body, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_writable(path: Path) -> None:
    """Make sure, before anything is asked, that answers can be saved.

    Raises:
        ProbeError: they cannot.
    """
    folder = path.parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ProbeError(f"{path} cannot be written; name a file in a directory of yours")


def save(path: Path, run: SavedRun) -> None:
    """Write `run` to `path`, over what was there.

    Raises:
        ProbeError: the disk does not take it.
    """
    rows: dict[str, Any] = {"format": FORMAT, **asdict(run)}
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.unlink(missing_ok=True)  # another's rights may be wider
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(rows, file)
        temporary.replace(path)
    except OSError as error:
        raise ProbeError(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> SavedRun:
    """Return the run that `save` wrote.

    Raises:
        ProbeError: the file cannot be read, or holds something else.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if rows["format"] != FORMAT:
            raise ValueError(f"its format is {rows['format']!r}, expected {FORMAT}")
        passes = {
            name: {each: _reply(row) for each, row in replies.items()}
            for name, replies in rows["passes"].items()
        }
        return SavedRun(dict(rows["digests"]), passes)
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProbeError(
            f"{path} holds no saved answers ({type(error).__name__} {error}); "
            "make one with hearth eval --save"
        ) from error


def _reply(row: Row) -> Reply:
    logprobs = tuple((str(token), float(value)) for token, value in row["logprobs"])
    return Reply(**{**row, "calls": tuple(row["calls"]), "logprobs": logprobs})
