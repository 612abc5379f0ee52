"""Prepares a process that computes: thread switching, open files, temporary directory."""

import contextlib
import os
import resource
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.logging_setup import configure
from hearth.shared.paths import HOME_DIR, env_file
from hearth.shared.private_files import private_directory
from hearth.shared.settings import Settings, load_settings

SWITCH_INTERVAL_S: Final = 0.0005  # slows a computing thread by 1 % if other threads run


def shorten_switch_interval() -> None:
    """Shorten the time for which one thread may hold the interpreter, process-wide."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


REMEDY = (
    "Raise the hard limit: `ulimit -Hn 4096` as root before the start, in launchd's plist "
    "HardResourceLimits / NumberOfFiles, in systemd's unit LimitNOFILE=4096."
)


def raise_open_file_limit(wanted: int, needed: int) -> int:
    """Raise the soft limit to `wanted` files or the hard limit; return the new limit.

    Raises:
        StartError: the hard limit is below `needed`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StartError(
            f"This process may open {hard:,} files (the hard limit of `ulimit -Hn`), and needs "
            f"{needed:,}. {REMEDY}"
        )
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        return reachable
    return soft


def open_files_max(wanted: int) -> int:
    """Return how many files this process may open, or `wanted` if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft


PRIVATE_TEMP: Final = HOME_DIR / "tmp"  # one for all servers of a user: compiling takes seconds
_DEFAULT: Final = "/tmp"


def temp_environment(environ: Mapping[str, str], instance_dir: Path) -> dict[str, str]:
    """Return a private TMPDIR for a process that runs MLX, to be added to `environ`.

    MLX compiles in the temporary directory, with whatever mode the umask gives. The result is empty
    where that directory is private already, as on macOS. `instance_dir` is private; it takes the
    compiled files if the home directory cannot be written.

    Raises:
        StartError: neither directory can be written.
    """
    if _is_private(Path(environ.get("TMPDIR") or _DEFAULT)):
        return {}
    for directory in (PRIVATE_TEMP, instance_dir / "tmp"):
        with contextlib.suppress(StartError, OSError):
            private_directory(directory)
            if _is_private(directory):
                return {"TMPDIR": str(directory)}
    raise StartError(
        f"Neither {PRIVATE_TEMP} nor {instance_dir / 'tmp'} can be made a directory for what MLX "
        "compiles. Make one of them writable, or set TMPDIR to a directory of yours (chmod 700)."
    )


def _is_private(directory: Path) -> bool:
    """Return whether this user can write to the directory and no other user can enter it."""
    try:
        status = directory.stat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and is_closed and os.access(directory, os.W_OK | os.X_OK)


OPEN_FILES: Final = 4096
OPEN_FILES_MIN: Final = 128


def begin_process(name: str) -> Settings:
    """Set up the log (called `name`), the limits and TMPDIR; return the settings.

    Raises:
        StartError: a setting is wrong, too few files may be open, or no directory is private.
    """
    shorten_switch_interval()
    raise_open_file_limit(OPEN_FILES, OPEN_FILES_MIN)
    settings = load_settings(os.environ, env_file())
    configure(settings.log_level.upper(), name, settings.log_prompts)
    os.environ |= temp_environment(os.environ, settings.instance_dir)
    return settings
