"""Reads a configuration file of an agent, and writes it so that it is whole at any time."""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final

from hearth.commands.agents import json_text, toml_text
from hearth.commands.agents.config_values import (
    ConfigError,
    Entry,
    Values,
    has,
    value_at,
    with_entry,
    without,
)

BYTES_MAX: Final = 4_000_000
SECRET_MODE: Final = 0o600
SYNTAXES: Final[dict[str, ModuleType]] = {
    "json": json_text,
    "json5": json_text,
    "toml": toml_text,
}


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds: None where there is no file."""

    data: bytes | None
    mode: int = SECRET_MODE  # of a file that is made


def text_of(path: Path, content: Content) -> str:
    """Return the text in `content`, which is that of `path`. Raises: ConfigError."""
    try:
        return (content.data or b"").decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 (byte {error.start:,})") from None


def read(path: Path) -> Content:
    """Return what the file holds that `path` is, or links to. Raises: ConfigError."""
    try:
        if path.is_fifo():
            raise ConfigError(f"{path} is a pipe, no file")
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        return Content(None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > BYTES_MAX:
        raise ConfigError(f"{path} is larger than {BYTES_MAX:,} bytes")
    return Content(data, stat.S_IMODE(about.st_mode))


def check_writable(path: Path) -> None:
    """Raises: ConfigError: the file, or the directory that it is in, is not to be written."""
    target = path.resolve()
    if target.exists() and not target.stat().st_mode & stat.S_IWUSR:
        raise ConfigError(
            f"{path} is read-only, so it may be managed by something else. Make it writable "
            f"(chmod u+w {target}), or use `hearth launch`, which writes nothing there."
        )
    parent = next(each for each in target.parents if each.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: {parent} is not yours to write.")


def write(path: Path, content: Content) -> None:
    """Have the file that `path` is, or links to, hold `content`; remove it where that is none.

    Raises:
        ConfigError: it cannot be written.
    """
    target = path.resolve()  # a link of the user's stays one
    try:
        if content.data is None:
            target.unlink(missing_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.data)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), content.mode)
                with contextlib.suppress(OSError):  # with sudo it stays its owner's
                    os.fchown(file.fileno(), target.stat().st_uid, target.stat().st_gid)
            os.replace(name, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


# ---------------------------------------------------------------- edits


def parsed(path: Path, syntax: str, text: str) -> Values:
    """Return what `text` says. Raises: ConfigError, which names `path`."""
    try:
        values: Values = SYNTAXES[syntax].values_of(text)
        if syntax == "json" and text.strip("\ufeff \t\r\n"):
            json.loads(text.removeprefix("\ufeff"))  # comments: its agent would not read it
    except (ConfigError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be edited: {error}. Mend it first.") from None
    return values


def edited(path: Path, syntax: str, text: str, entries: Sequence[Entry]) -> tuple[str, list[Entry]]:
    """Return `text` with `entries` set, and these with what each has replaced.

    Raises:
        ConfigError: an edit would change more than that.
    """
    module, done = SYNTAXES[syntax], []
    for entry in entries:
        expected = with_entry(parsed(path, syntax, text), entry)
        before = module.text_at(text, entry.keys) if entry.keys[-1] != 0 else None
        done.append(replace(entry, before=before))
        text = module.set_value(text, entry.keys, entry.value)
        _check(path, syntax, text, expected)
    return text, done


def reverted(
    path: Path, syntax: str, text: str, entries: Sequence[Entry]
) -> tuple[str, list[Entry]]:
    """Return `text` without `entries`, and those of them that were changed since, and stay.

    Raises:
        ConfigError: an edit would change more than that.
    """
    kept = []
    for entry in reversed(entries):
        values = parsed(path, syntax, text)
        if has(values, entry):
            text = _without_entry(path, syntax, text, entry)
        elif value_at(values, entry.keys) is not None:
            kept.append(entry)
    return text, kept


def _without_entry(path: Path, syntax: str, text: str, entry: Entry) -> str:
    module, values = SYNTAXES[syntax], parsed(path, syntax, text)
    if entry.before is not None:
        text = module.set_text(text, entry.keys, entry.before)
        restored = value_at(parsed(path, syntax, text), entry.keys)
        _check(path, syntax, text, with_entry(values, replace(entry, value=restored)))
        return text
    text = module.remove(text, entry.keys, entry.value)
    values = without(values, entry.keys, entry.value)
    for depth in range(len(entry.keys) - 1, entry.depth, -1):  # objects that were made for it
        outer = entry.keys[:depth]
        if (empty := value_at(values, outer)) not in ({}, []):
            break
        if module.text_at(text, outer) is not None:  # a table of TOML is gone with its last one
            text = module.remove(text, outer, empty)
        values = without(values, outer, empty)
    _check(path, syntax, text, values)
    return text


def _check(path: Path, syntax: str, text: str, expected: Values) -> None:
    try:
        is_right = parsed(path, syntax, text) == expected
    except ConfigError:  # what was edited is right, so the edit is not
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{path} is written in a way that cannot be edited without changing more. "
            "docs/clients.md shows what to write by hand."
        )
