"""Makes the arguments and the environment of a server, of which nothing is the user's settings."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.meter_file import METER_DIR
from hearth.shared.openblas_preload import openblas_environment
from hearth.shared.paths import without_home
from hearth.shared.settings import Settings
from hearth.shared.settings_from_env import variables_in

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


def placeholders(model: Path, port: int, home: Path, memory_mb: int) -> dict[str, str]:
    """Return what stands for each name in braces in a server's arguments and environment."""
    try:
        sees = "vision_config" in json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        sees = False
    return {
        "model": str(model),
        "port": str(port),
        "dir": str(home),
        "memory_mb": str(memory_mb),
        "memory_bytes": str(memory_mb << 20),
        "memory_gb": f"{memory_mb / 1024:.6f}",
        "kind": "multimodal" if sees else "lm",
        "models_dir": str(home / "models"),  # in which the model is the only one
        "model_name": model.name,
    }


def arguments_of(server: Server, memory: Memory) -> tuple[str, ...]:
    """Return what stands behind the program."""
    return (*server.arguments, *server.memory_arguments.get(memory, ()))


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
    # Hearth is found where this process finds it; a package of its own has an environment.
    paths = [str(METER_DIR)]
    if not (server.package or server.program) and environ.get("PYTHONPATH"):
        paths.append(environ["PYTHONPATH"])
    own = {**server.environment, **server.memory_environment.get(memory, {})}
    if server.name == HEARTH:
        own = {**defaults_against(settings_file), **own}
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


def defaults_against(env_file: Path | None) -> dict[str, str]:
    """Return Hearth's defaults of the settings in `env_file`, which its server would read."""
    defaults = {
        row.metadata["name"]: row.metadata["default"] for row in dataclasses.fields(Settings)
    }
    return {name: defaults[name] for name in variables_in(env_file) if name in defaults}


def without_paths(text: str, model: Path, home: Path) -> str:
    """Return `text` without the places of this user's files."""
    for path, name in ((model, "{model}"), (home, "{dir}")):
        text = text.replace(str(path), name)
    return without_home(text)
