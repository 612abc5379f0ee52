"""Fetches the suites of other projects, each at its one version, and unpacks what is run of them.

An sdist comes by pip from PyPI, a repository by git from GitHub, or both from a folder that has
them already: `NAME-VERSION.tar.gz`, or `OWNER+NAME/repo`, a git directory.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.nightly.suites import Origin, Source, Suite

FETCH_WAIT_S_MAX: Final = 600
# What pip, uv and git are given of the user's environment. Packages may run code while they are
# built, and no key of a user is theirs.
INSTALLER_NEEDS: Final = frozenset((
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_DIR", "XDG_CONFIG_HOME"),
    *("XDG_DATA_HOME", "REQUESTS_CA_BUNDLE", "DEVELOPER_DIR", "SDKROOT"),
))  # fmt: skip
INSTALLERS_OWN: Final = ("PIP_", "UV_")
# Neither a prompt for a password nor the user's own settings of git.
GIT_ENVIRONMENT: Final = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


class FetchError(Exception):
    """A suite, or what it needs, cannot be had here; the text says why."""


def checked(command: Sequence[str | Path], what: str) -> bytes:
    """Run a command and return what it printed.

    Raises:
        FetchError: it failed, is not there, or took longer than FETCH_WAIT_S_MAX.
    """
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            check=False,
            timeout=FETCH_WAIT_S_MAX,
            env={**_installer_environment(), **GIT_ENVIRONMENT},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"{what}: {error}") from error
    if done.returncode:
        raise FetchError(f"{what}: {done.stderr.decode(errors='replace').strip()[-400:]}")
    return done.stdout


def unpacked(source: Source, cache_dir: Path, sources_dir: Path | None, target: Path) -> Path:
    """Return a fresh copy of `source` below `target`; what was fetched stays in `cache_dir`.

    Raises:
        FetchError: it cannot be fetched.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if source.origin is Origin.SDIST:
        archive = _sdist(source, cache_dir, sources_dir)
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        return target / archive.name.removesuffix(".tar.gz")
    git_dir = _git_dir(source, cache_dir, sources_dir)
    command: list[str | Path] = ["git", "--git-dir", git_dir, "archive", source.version]
    command += source.paths
    with tarfile.open(fileobj=io.BytesIO(checked(command, source.label))) as tar:
        tar.extractall(target, filter="data")
    return target


def place_address(suite: Suite, directory: Path, url: str) -> None:
    """Write the server's address where a program has a fixed one."""
    for old, new in suite.replaced:
        for name in suite.arguments:
            path = directory / name
            text = path.read_text()
            if old not in text:
                raise FetchError(f"{name} has no {old} any more: see how it is given its address")
            path.write_text(text.replace(old, new.format(url=url)))


def _installer_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in INSTALLER_NEEDS or name.startswith(INSTALLERS_OWN)
    }


def _sdist(source: Source, cache_dir: Path, sources_dir: Path | None) -> Path:
    name = f"{source.project.replace('-', '_')}-{source.version}.tar.gz"
    for folder in (sources_dir, cache_dir):
        if folder is not None and (folder / name).is_file():
            return folder / name
    cache_dir.mkdir(parents=True, exist_ok=True)
    wanted = f"{source.project}=={source.version}"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    checked((*pip, "--no-binary", ":all:", "--dest", cache_dir, wanted), source.label)
    if not (cache_dir / name).is_file():
        raise FetchError(f"{source.label}: pip gave no {name}")
    return cache_dir / name


def _git_dir(source: Source, cache_dir: Path, sources_dir: Path | None) -> Path:
    name = source.project.replace("/", "+")
    if sources_dir is not None and (sources_dir / name / "repo").is_dir():
        return sources_dir / name / "repo"
    kept = cache_dir / name
    if not kept.is_dir():
        url = f"https://github.com/{source.project}"
        part = cache_dir / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        checked(("git", "clone", "--quiet", "--bare", url, part), source.label)
        part.rename(kept)
    return kept
