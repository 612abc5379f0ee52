"""Fetches makers' own chat templates out of packages of the package index; nothing is installed.

They are not ours to keep in the tree. `install_and_run.py test all` reads them.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from scripts.fixtures.checkpoint_files import new_directory
from scripts.nightly.sources import checked

CACHE_DIR: Final = Path("~/.cache/hearth-templates").expanduser()


@dataclass(frozen=True)
class Package:
    """One file of the index, at its one version."""

    name: str
    version: str
    format: str  # of the archive, as shutil names it
    sha256: str


PACKAGES: Final = (
    Package(  # it carries llama.cpp's models/templates
        *("llama-cpp-python", "0.3.36", "gztar"),
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ),
    Package(  # DeepSeek V4.1's
        *("gmlx", "0.5.3", "zip"),
        "f7bdd74c6e96e49d4d7851e7c7790258edaaea20ae72a1d2848f85a598fce2d8",
    ),
)
WANTED: Final = os.environ.get("HEARTH_REAL_TEMPLATES", "")  # tests/helpers/run_suite.py sets it
NEEDS_REAL_TEMPLATES: Final = pytest.mark.skipif(
    not WANTED, reason="`install_and_run.py test all` reads the makers' templates"
)


@cache
def real_templates() -> Path:
    """Return the directory with all templates, fetched on first use on this machine.

    Raises FetchError where a package is not to be had from the index.
    """
    pins = "".join(package.sha256 for package in PACKAGES)
    target = CACHE_DIR / hashlib.sha256(pins.encode()).hexdigest()[:16]
    if not target.is_dir():
        with new_directory(target) as directory:
            for package in PACKAGES:
                _fetch(package, directory)
    return target


def real_template(name: str) -> str:
    """Return the template of that file name. Raises FetchError as `real_templates` does."""
    (path,) = real_templates().glob(f"*+{name}")
    return path.read_text()


def _fetch(package: Package, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch)
        checked((*pip, f"{package.name}=={package.version}"), package.name)
        (archive,) = Path(scratch).iterdir()
        got = hashlib.sha256(archive.read_bytes()).hexdigest()
        assert got == package.sha256, f"{archive.name} has the sha256 {got}: not what was pinned"
        unpacked = Path(scratch) / "unpacked"
        shutil.unpack_archive(archive, unpacked, package.format)
        for path in unpacked.rglob("*.jinja"):
            place = directory / path.relative_to(unpacked).as_posix().replace("/", "+")
            shutil.copy(path, place)
