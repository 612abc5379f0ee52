"""Lists what an earlier version of `hearth connect` wrote into an agent's files and still stands.

That version kept a record of it, ~/.hearth/connect/AGENT/record.json, and the server's key beside
it. Both are only read.
"""

import json
import tomllib
from pathlib import Path
from typing import Any, Final

from hearth.commands.agents.user_config import json_in
from hearth.shared.errors import StartError

RECORD: Final = "record.json"


def lines_about(directory: Path) -> list[str]:
    """Return what is to be taken out, a line each; none where `directory` has no record.

    Raises:
        StartError: the record cannot be read.
    """
    record = directory / RECORD
    try:
        files = json.loads(record.read_bytes())["files"]
        told = [line for file in files for line in _lines_of(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise StartError(
            f"{record} cannot be read ({type(error).__name__}). It says what an earlier version "
            "wrote into your files; remove it once they are as you want them."
        ) from None
    return [*told, f"the directory {directory}: what your files were before, and the server's key"]


def _lines_of(file: dict[str, Any]) -> list[str]:
    path, lines = Path(file["path"]), []
    for entry in file["entries"]:
        if _stands(path, entry["keys"], entry["value"]):
            place = ".".join(str(key) for key in entry["keys"])
            was = f" (it was {entry['before']})" if entry["before"] else ""
            lines.append(f"{path}: {place}{was}")
    return lines


def _stands(path: Path, keys: list[str | int], value: Any) -> bool:
    """Whether the file says so; also where that cannot be told."""
    try:
        text = path.read_text()
        place: Any = tomllib.loads(text) if path.suffix == ".toml" else json_in(text, str(path))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, StartError):
        return True
    for key in keys:
        if key == 0:  # an element of the list here
            return isinstance(place, list) and value in place
        place = place.get(key) if isinstance(place, dict) else None
    return bool(place == value)
