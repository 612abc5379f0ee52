"""Plans what `connect` and its undo change, does it, and keeps what an undo needs.

A record, ~/.hearth/connect/AGENT/record.json, holds what each file was before. It is written
before the first file is, and removed after the last one is as it was.
"""

import base64
import contextlib
import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.agents import config_file
from hearth.commands.agents.agent_setup import ConfigFile
from hearth.commands.agents.config_file import SECRET_MODE, Content
from hearth.commands.agents.config_values import ConfigError, Entry, entries_of

RECORD: Final = "record.json"
FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class ConnectedFile:
    """A file that is connected: what it was before, and what of it is ours."""

    path: Path
    syntax: str
    before: Content
    after_sha256: str  # of what `connect` wrote
    found_sha256: str  # of what it found, and leaves where it is killed before it writes
    entries: list[Entry]
    directories: list[str]  # made for it, the outermost first


@dataclass(frozen=True, slots=True)
class Change:
    """One file's change: from `now` to `then`."""

    path: Path
    now: Content
    then: Content
    connected: ConnectedFile | None = None  # once it is done; None = it is undone
    kept: tuple[Entry, ...] = ()  # values of ours that its user has changed since, and that stay


# ---------------------------------------------------------------- plans


def plan_connect(files: Sequence[ConfigFile], before: Sequence[ConnectedFile]) -> list[Change]:
    """Return the changes that connect `files`; one that is connected already is undone first.

    Raises:
        ConfigError: a file cannot be read, edited or written.
    """
    known = {each.path: each for each in before}
    return [_connecting(file, known.get(file.path)) for file in files]


def _connecting(file: ConfigFile, known: ConnectedFile | None) -> Change:
    now = base = config_file.read(file.path)
    config_file.check_writable(file.path)
    parents = reversed(file.path.resolve().parents)
    directories = [str(each) for each in parents if not each.exists()]
    if known is not None:
        base, directories = _undone(known, now).then, known.directories
    text = config_file.text_of(file.path, base)
    values = config_file.parsed(file.path, file.syntax, text)
    entries = entries_of(file.wanted(values), values)
    text, entries = config_file.edited(file.path, file.syntax, text, entries)
    data = text.encode() if entries else base.data
    then = Content(data, SECRET_MODE if file.holds_key else base.mode)
    connected = ConnectedFile(
        file.path, file.syntax, base, _sha256(then), _sha256(now), entries, directories
    )
    return Change(file.path, now, then, connected)


def plan_undo(files: Sequence[ConnectedFile]) -> list[Change]:
    """Return the changes that give back what each of `files` was. Raises: ConfigError."""
    changes = []
    for file in files:
        now = config_file.read(file.path)
        config_file.check_writable(file.path)
        changes.append(_undone(file, now))
    return changes


def _undone(file: ConnectedFile, now: Content) -> Change:
    """Return the change that takes out what is ours; to the byte, where that is all."""
    if now.data is None or now.data == file.before.data:
        return Change(file.path, now, now)
    if _sha256(now) in (file.after_sha256, file.found_sha256):
        return Change(file.path, now, file.before)
    text = config_file.text_of(file.path, now)
    text, kept = config_file.reverted(file.path, file.syntax, text, file.entries)
    data: bytes | None = text.encode()
    if file.before.data is None and not config_file.parsed(file.path, file.syntax, text):
        data = None
    return Change(file.path, now, Content(data, now.mode), kept=tuple(kept))


def _sha256(content: Content) -> str:
    return hashlib.sha256(content.data or b"").hexdigest()


def diff_of(change: Change, secrets: Sequence[str]) -> str:
    """Return the unified diff of `change`, without the keys `secrets`."""
    sides = (change.now, change.then)
    old, new = ("/dev/null" if each.data is None else str(change.path) for each in sides)
    was, then = (config_file.text_of(change.path, each).splitlines(True) for each in sides)
    shown = []
    for line in difflib.unified_diff(was, then, old, new):
        line = line.rstrip("\r\n")
        for secret in filter(None, secrets):
            line = line.replace(secret, "<the server's key>")
        shown.append(line)
    return "\n".join(shown)


# ---------------------------------------------------------------- doing


def apply(changes: Sequence[Change]) -> None:
    """Write all of `changes`, or none.

    Raises:
        ConfigError: a file is another one than was planned with, or cannot be written.
    """
    done: list[Change] = []
    try:
        for change in changes:
            if config_file.read(change.path).data != change.now.data:
                raise ConfigError(f"{change.path} was changed meanwhile. Run this again.")
            if change.then != change.now:
                config_file.write(change.path, change.then)
                done.append(change)
    except ConfigError:
        for change in reversed(done):
            config_file.write(change.path, change.now)
        raise


def remove_directories(files: Sequence[ConnectedFile]) -> None:
    """Remove the directories that were made for `files`, where nothing else is in them."""
    for file in files:
        for directory in reversed(file.directories):
            with contextlib.suppress(OSError):
                Path(directory).rmdir()


# ---------------------------------------------------------------- the record


def write_record(directory: Path, changes: Sequence[Change]) -> None:
    """Keep what undoes `changes`. Raises: ConfigError."""
    rows = [_row(change.connected) for change in changes if change.connected is not None]
    text = json.dumps({"format": FORMAT, "files": rows}, indent=1)
    config_file.write(directory / RECORD, Content(text.encode()))


def read_record(directory: Path) -> list[ConnectedFile]:
    """Return the files that are connected; none where no record is. Raises: ConfigError."""
    content = config_file.read(directory / RECORD)
    if content.data is None:
        return []
    try:
        return [_file(row) for row in json.loads(content.data)["files"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{directory / RECORD} cannot be read ({type(error).__name__}). It holds what your "
            "files were before (base64); remove it once they are as you want them."
        ) from None


def _row(file: ConnectedFile) -> dict[str, Any]:
    data = file.before.data
    before = None if data is None else base64.b64encode(data).decode()
    return {
        "path": str(file.path),
        "syntax": file.syntax,
        "before": before,
        "mode": file.before.mode,
        "after_sha256": file.after_sha256,
        "found_sha256": file.found_sha256,
        "entries": [asdict(entry) for entry in file.entries],
        "directories": file.directories,
    }


def _file(row: dict[str, Any]) -> ConnectedFile:
    """Raises: ValueError, KeyError, TypeError, AttributeError: it is damaged."""
    keys = [key for entry in row["entries"] for key in entry["keys"]]
    texts = [row["path"], row["after_sha256"], row["found_sha256"], *row["directories"]]
    numbers = [row["mode"], *(entry["depth"] for entry in row["entries"])]
    if (
        row["syntax"] not in config_file.SYNTAXES
        or not all(isinstance(text, str) for text in texts)
        or not all(type(number) is int for number in numbers)
        or not all(isinstance(key, str) or key == 0 for key in keys)
    ):
        raise ValueError(row)
    data = None if row["before"] is None else base64.b64decode(row["before"])
    entries = [Entry(**{**entry, "keys": tuple(entry["keys"])}) for entry in row["entries"]]
    return ConnectedFile(
        Path(row["path"]),
        row["syntax"],
        Content(data, row["mode"]),
        row["after_sha256"],
        row["found_sha256"],
        entries,
        row["directories"],
    )
