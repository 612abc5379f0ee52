"""Makes an environment for suites, by uv, outside the checkout and Hearth's own environment."""

import hashlib
import os
import shutil
import sys
import venv
from pathlib import Path
from typing import Final

from scripts.nightly.sources import checked
from scripts.nightly.suites import Packages

UV: Final = "uv==0.13.9"
CACHE_DIR: Final = Path("~/.cache/hearth-nightly").expanduser()
# A suite is given no variable of the user's, so that no key of his reaches a server or a test.
KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR")


def directory_of(packages: Packages, cache_dir: Path = CACHE_DIR) -> Path:
    """Return where the environment lies: another set of packages is another place."""
    named = "\n".join((sys.version, *packages.requirements))
    return cache_dir / f"{packages.name}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"


def python_of(packages: Packages, cache_dir: Path = CACHE_DIR) -> Path:
    """Return the interpreter of an environment that has `packages`, made where it is missing.

    Raises:
        FetchError: a package cannot be installed here.
    """
    made = directory_of(packages, cache_dir)
    if not (made / "bin" / "python").exists():
        uv, part = _uv(cache_dir), made.with_name(f"{made.name}.part")
        what = f"the environment {packages.name}"
        venv_command = (uv, "venv", "--quiet", "--clear", "--relocatable")
        checked((*venv_command, "--python", sys.executable, part), what)
        python = part / "bin" / "python"
        checked((uv, "pip", "install", "--quiet", "--python", python, *packages.requirements), what)
        part.rename(made)
    return made / "bin" / "python"


def variables(home: Path) -> dict[str, str]:
    """Return the environment in which suites run; `home` is empty."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _uv(cache_dir: Path) -> Path:
    found = shutil.which("uv")
    if found:
        return Path(found)
    directory = cache_dir / "uv"
    uv = directory / "bin" / "uv"
    if not uv.exists():
        venv.create(directory, with_pip=True)
        pip = directory / "bin" / "pip"
        checked((pip, "install", "--quiet", UV), UV)
    return uv
