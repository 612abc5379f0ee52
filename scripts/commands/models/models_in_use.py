"""Tells which models the servers of this user have, as their pid files name them. Asks none."""

import json
from pathlib import Path
from typing import Any, Final

from hearth.commands.take_port import read_pid_file
from hearth.shared.errors import StartError
from hearth.shared.models.model_path import named_model
from hearth.shared.private_files import read_small_file
from hearth.shared.processes import PID_FILE

_BYTES_MAX: Final = 1024**2


def sources_in_use(run_dir: Path) -> list[str]:
    """Return the directories, hub ids and aliases of all servers that run, on whichever port."""
    found = []
    for file in sorted(run_dir.glob(f"*/{PID_FILE}")):
        supervisor, _ = read_pid_file(file)
        if supervisor is not None and supervisor.is_running:
            found += _sources(file)
    return found


def is_in_use(sources: list[str], directory: Path, hub_id: str = "") -> bool:
    """Return whether one of `sources` is in `directory`, or means what the hub calls `hub_id`."""
    root = directory.resolve()
    for source in sources:
        named = _named(source)
        if isinstance(named, Path):
            if root in (named.resolve(), *named.resolve().parents):
                return True
        elif hub_id and named.lower() == hub_id.lower():
            return True
    return False


def _sources(file: Path) -> list[str]:
    try:
        told: Any = json.loads(read_small_file(file, _BYTES_MAX))["models"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # it has just ended
        return []
    return [each for each in told if isinstance(each, str)] if isinstance(told, list) else []


def _named(source: str) -> Path | str:
    try:
        return Path(source) if Path(source).exists() else named_model(source)
    except (OSError, StartError):
        return source
