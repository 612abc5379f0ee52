"""Fetches other projects' sources and packages, each at its one version, without the user's keys.

A source comes by pip from PyPI (`NAME==VERSION`), or by git from GitHub (`OWNER/NAME@COMMIT`). What
lies in CACHE_DIR is not fetched again.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CACHE_DIR: Final = Path("~/.cache/hearth-nightly").expanduser()
FETCH_WAIT_S_MAX: Final = 600
# Packages may run code while they are installed, and no key of a user is theirs.
NEEDED: Final = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TMPDIR|XDG_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|PIP_\w+|\w+_PROXY", re.I
)


class FetchError(Exception):
    """A suite, or what it needs, cannot be had here; the text says why."""


def checked(command: Sequence[str | Path], what: str) -> bytes:
    """Run a command and return what it printed.

    Raises:
        FetchError: it failed, is not there, or took longer than FETCH_WAIT_S_MAX.
    """
    # Neither a prompt for a password nor the user's own settings of git.
    git = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": "/dev/null"}
    env = {name: value for name, value in os.environ.items() if NEEDED.fullmatch(name)} | git
    try:
        return subprocess.run(
            command, capture_output=True, check=True, timeout=FETCH_WAIT_S_MAX, env=env
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[-400:]
        raise FetchError(f"{what}: {error} {said}") from error


def unpacked(source: str, paths: Sequence[str], target: Path) -> Path:
    """Return a fresh copy of `source` below `target`: all of a package, `paths` of a repository.

    Raises:
        FetchError: it cannot be fetched.
    """
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    if "==" in source:
        archive = CACHE_DIR / f"{source.replace('==', '-')}.tar.gz"
        if not archive.exists():
            checked(
                (
                    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                    *("--no-binary", ":all:", "--dest", CACHE_DIR, source),
                ),
                source,
            )
        shutil.unpack_archive(archive, target, filter="data")
        return target / source.replace("==", "-")
    project, _, commit = source.partition("@")
    kept = CACHE_DIR / project.replace("/", "+")
    if not kept.exists():
        part = kept.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        checked(
            ("git", "clone", "--quiet", "--bare", f"https://github.com/{project}", part), source
        )
        part.rename(kept)
    checked(
        ("git", "--git-dir", kept, "archive", "--output", f"{target}.tar", commit, *paths), source
    )
    shutil.unpack_archive(f"{target}.tar", target, filter="data")
    return target


def python_of(packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment that has `packages`, made where it is missing.

    Raises:
        FetchError: a package cannot be installed here.
    """
    named = "\n".join((sys.version, *packages))
    made = CACHE_DIR / hashlib.sha256(named.encode()).hexdigest()[:12]
    if not made.exists():
        part = made.with_suffix(".part")
        venv.create(part, clear=True, with_pip=True)
        checked((part / "bin" / "python", "-m", "pip", "install", "--quiet", *packages), "packages")
        part.rename(made)
    return made / "bin" / "python"
