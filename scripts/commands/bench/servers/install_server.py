"""Installs the servers that `hearth bench` measures, each in an environment of its own.

They lie in ~/.cache/hearth-peers and stay there for the next run; to be rid of them, remove it.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Final

from hearth.commands.bench.server import Server

ENVIRONMENTS_DIR: Final = Path("~/.cache/hearth-peers").expanduser()
UV: Final = "uv==0.13.9"
INSTALL_WAIT_S_MAX: Final = 1800
# No text model needs them, and they are gigabytes (mflux makes images, and pins MLX for CUDA).
LEFT_OUT: Final = ("torch", "torchvision", "mflux")
NEEDED: Final = {"mlx-openai-server": ("torch", "torchvision")}  # it imports them
MAC_ALONE: Final = frozenset({"mtplx"})  # elsewhere they install, and compute nothing
PLATFORM_MLX: Final = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
INSTALLED_BYTES: Final = 600_000_000  # about; as it was measured on Linux

# What an installer needs of the user's environment. Packages may run code while they are built,
# and no key of a user is theirs.
INSTALLER_NEEDS: Final = frozenset((
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_DIR", "XDG_CONFIG_HOME"),
    *("XDG_DATA_HOME", "REQUESTS_CA_BUNDLE", "DEVELOPER_DIR", "SDKROOT"),
))  # fmt: skip
INSTALLERS_OWN: Final = ("PIP_", "UV_")


class InstallError(Exception):
    """A server cannot be installed here; the text says which and why."""


def environment_dir(server: Server) -> Path:
    """Return where the environment of a server with a package lies."""
    return ENVIRONMENTS_DIR / server.package


def program_of(server: Server) -> str | None:
    """Return the executable that runs a server; None where there is none yet."""
    if server.program:
        return shutil.which(server.program)
    if not server.package:
        return sys.executable
    python = environment_dir(server) / "bin" / "python"
    return str(python) if python.exists() else None


def is_installed(server: Server) -> bool:
    """Say whether a server can be started as it is."""
    return bool(server.url) or program_of(server) is not None


def can_install(server: Server) -> bool:
    """Say whether `install` can be tried: an executable is its owner's to install."""
    is_for_here = sys.platform == "darwin" or server.name not in MAC_ALONE
    return bool(server.package) and not server.program and is_for_here


def install_bytes(server: Server) -> int:
    """Return about how much of the disk `install` takes; torch on Linux brings CUDA along."""
    if is_installed(server):
        return 0
    if server.name not in NEEDED:
        return INSTALLED_BYTES
    return INSTALLED_BYTES + (1_000_000_000 if sys.platform == "darwin" else 6_000_000_000)


def install(server: Server) -> None:
    """Make the server's environment where it is missing; takes a minute and a gigabyte or so.

    uv makes it, for pip cannot leave a dependency out.

    Raises:
        InstallError: it cannot be installed here.
    """
    if is_installed(server):
        return
    if not can_install(server):
        why = f"there is no {server.program} on PATH" if server.program else "it needs a Mac"
        raise InstallError(f"{server.name} is not installed: {why}")
    uv_dir = ENVIRONMENTS_DIR / "uv"
    uv = str(uv_dir / "bin" / "uv")
    if not Path(uv).exists():
        venv.create(uv_dir, with_pip=True)
        _step(server, [str(uv_dir / "bin" / "pip"), "install", "--quiet", UV])
    left_out = [name for name in LEFT_OUT if name not in NEEDED.get(server.name, ())]
    override = uv_dir / "override.txt"
    override.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in left_out))
    made = environment_dir(server).with_name(f"{server.package}.part")
    _step(server, [uv, "venv", "--quiet", "--clear", "--relocatable", str(made)])
    command = [uv, "pip", "install", "--quiet", "--python", str(made / "bin" / "python")]
    needed = NEEDED.get(server.name, ())
    _step(server, [*command, "--override", str(override), server.package, PLATFORM_MLX, *needed])
    made.rename(environment_dir(server))


def installer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what pip, uv and git are given of `environ`: where to look, and no keys of others."""
    return {
        name: value
        for name, value in environ.items()
        if name.upper() in INSTALLER_NEEDS or name.startswith(INSTALLERS_OWN)
    }


def _step(server: Server, command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=INSTALL_WAIT_S_MAX,
            check=False,
            env=installer_environment(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{server.package} cannot be installed: {error}") from error
    if done.returncode:
        raise InstallError(f"{server.package} cannot be installed: {done.stderr.strip()[-600:]}")


def told_version(server: Server) -> str:
    """Return what is measured: the package, and the mlx-lm that it computes with."""
    if server.url or server.program:
        return "not known"
    if not server.package:
        return ", ".join(_own_version(name) for name in _own_packages(server))
    sites = [str(path) for path in environment_dir(server).glob("lib/python*/site-packages")]
    found = {each.name.lower(): each.version for each in distributions(path=sites)}
    told = [server.package.replace("==", " ")]
    told += [f"{name} {found[name]}" for name in ("mlx-lm", "mlx-vlm", "mlx") if name in found]
    return ", ".join(told)


def _own_packages(server: Server) -> tuple[str, ...]:
    first = {"mlx_lm": "mlx-lm", "mlx_vlm": "mlx-vlm"}.get(server.name, "hearth-llm")
    return tuple(dict.fromkeys((first, "mlx-lm", "mlx")))


def _own_version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} (a checkout)"
