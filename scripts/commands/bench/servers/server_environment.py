"""Makes the command and the environment of a server, of which nothing is the user's settings."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.meter_file import METER_DIR
from hearth.shared.linux_environment import openblas_environment
from hearth.shared.paths import without_home
from hearth.shared.settings import Settings, variables_in

# What a server gets of the user's environment: nothing that sets how it works.
PASSED: Final = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM"),
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"),
    *("OPENBLAS_L2_SIZE", "CUDA_VISIBLE_DEVICES", "SSL_CERT_FILE"),
)

# A server that is measured fetches nothing and tells nobody of itself.
SILENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "RAPID_MLX_DISABLE_VERSION_CHECK": "1",  # at each start, and while it runs
}


def program_of(server: Server) -> str | None:
    """Return the executable that runs a server, Hearth's own environment first; None without it."""
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    return shutil.which(server.command[0], path=os.pathsep.join(places))


def version_of(server: Server) -> str:
    """Return the versions of a server's packages, by the environment that its program lies in."""
    program = Path(program_of(server) or "") if server.command else Path()
    # A tool of uv is a link into its environment; the Python of an environment links out of it.
    program = program if str(program) == sys.executable else program.resolve()
    sites = [str(path) for path in program.parent.parent.glob("lib/python*/site-packages")]
    found = {each.name.lower(): each.version for each in distributions(path=sites)}
    return ", ".join(f"{name} {found[name]}" for name in server.packages if name in found)


def placeholders(model: Path, port: int, home: Path, memory_mb: int) -> dict[str, str]:
    """Return what stands for each name in braces in a server's arguments and environment."""
    return {
        "model": str(model),
        "port": str(port),
        "dir": str(home),
        "memory_mb": str(memory_mb),
        "memory_bytes": str(memory_mb << 20),
        "memory_gb": f"{memory_mb / 1024:.6f}",
    }


def command_of(server: Server, memory: Memory = Memory.DEFAULT) -> str:
    """Return the command as a reader would type it, with {model}, {port} and {dir}."""
    if server.url:
        return "(as its owner has started it)"
    environment = {**server.environment, **server.memory_environment.get(memory, {})}
    words = [f"{name}={value}" for name, value in environment.items()]
    words += [Path(server.command[0]).name, *server.command[1:]]
    return " ".join((*words, *server.memory_arguments.get(memory, ())))


def environment_of(
    server: Server,
    memory: Memory,
    given: Mapping[str, str],
    environ: Mapping[str, str],
    settings_file: Path | None = None,
) -> dict[str, str]:
    """Return all of a server's environment; of `environ`, only what sets nothing.

    `settings_file` is the .env that Hearth reads where it is installed: its defaults go before it.
    """
    home = given["dir"]
    passed = {name: environ[name] for name in PASSED if name in environ}
    # Hearth is found where this process finds it.
    paths = [str(METER_DIR)]
    own = {**server.environment, **server.memory_environment.get(memory, {})}
    if server.name == HEARTH:
        paths += filter(None, (environ.get("PYTHONPATH"),))
        defaults = {
            row.metadata["name"]: row.metadata["default"] for row in dataclasses.fields(Settings)
        }
        written = variables_in(settings_file)
        own = {**{name: defaults[name] for name in written if name in defaults}, **own}
    return {
        **passed,
        **openblas_environment(passed),
        "HOME": home,
        "XDG_CACHE_HOME": f"{home}/.cache",
        **SILENT,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "METER_DIR": f"{home}/meter",
        **{name: value.format(**given) for name, value in own.items()},
    }


def without_paths(text: str, model: Path, home: Path) -> str:
    """Return `text` without the places of this user's files."""
    for path, name in ((model, "{model}"), (home, "{dir}")):
        text = text.replace(str(path), name)
    return without_home(text)
