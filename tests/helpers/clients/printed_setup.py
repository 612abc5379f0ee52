"""Puts each text that `hearth connect` prints into its file, as its reader does."""

import json
import re
from pathlib import Path
from typing import Any, Final

from hearth.commands.agents.user_config import json_in

_TEXT: Final = re.compile(r"^(?:Put|Merge) into (\S+):\n(.+?)\n\n", re.MULTILINE | re.DOTALL)
_EXPORT: Final = re.compile(r"^export (\w+)=YOUR_KEY$", re.MULTILINE)
_BARE_NAME: Final = re.compile(r"(\w+):(?= )")  # as JSON5 has it


def texts_in(printed: str) -> dict[Path, str]:
    """Return each text by the file that it is for."""
    return {Path(path): text + "\n" for path, text in _TEXT.findall(printed)}


def environment_in(printed: str, key: str) -> dict[str, str]:
    """Return the variables that are to be set, with the server's key."""
    return dict.fromkeys(_EXPORT.findall(printed), key)


def put(path: Path, text: str) -> None:
    """Put `text` into the file, in place of what it says of the same names."""
    own = path.read_text() if path.exists() else ""
    if path.suffix == ".toml":
        names = [line.split(" = ")[0] for line in text.splitlines()]
        kept = [line for line in own.splitlines() if line.split(" = ")[0] not in names]
        path.write_text(text + "\n".join(kept) + "\n")
        return
    quoted = _BARE_NAME.sub(r'"\1":', own.replace("'", '"'))
    made = _merged(json_in(quoted, path.name), json.loads(text))
    if "enabled_providers" in made:  # as opencode's remark says
        made["enabled_providers"].append("hearth")
    path.write_text(json.dumps(made, indent=2))


def _merged(values: Any, over: Any) -> Any:
    if isinstance(values, list) and isinstance(over, list):
        return over + values
    if not isinstance(values, dict) or not isinstance(over, dict):
        return over
    return values | {name: _merged(values.get(name), value) for name, value in over.items()}
