"""Tells what a setting names as a model: the builtin one, a directory, a hub id. Loads nothing."""

from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.settings import POCKET

_BUILTIN: Final = "builtin:"


def named_model(source: str, setting: str = "MODEL_PATH") -> Path | str:
    """Return the directory that `source` names, or else the builtin model or the hub id.

    A mistyped path is refused here, before a hub is asked for it. `setting` is where it is from.

    Raises:
        StartError: it names nothing that could be a model.
    """
    if source.startswith(_BUILTIN):
        if source != POCKET:
            raise StartError(f"{setting} is {source!r}; the only builtin model is {POCKET}.")
        return source
    try:
        path = Path(source).expanduser()
        is_directory = path.is_dir()
        is_model = is_directory and (path / "config.json").is_file()
    except (OSError, RuntimeError) as error:  # closed to this user, too long, nobody's home
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(
            f"{setting} is {source!r:.200}, which cannot be read ({reason}). Give this user, or "
            f"on macOS this program, access to it, or set {setting}."
        ) from None
    if is_model:
        return path
    if is_directory:
        raise StartError(f"{setting} is {source!r}, a directory without a config.json.")
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise StartError(
            f"{setting} is {source!r}, which is neither a directory nor a hub id (owner/name)."
        )
    return source


def check_model(source: str, setting: str = "MODEL_PATH") -> str:
    """Return a sentence about where the model is, without reading it.

    Raises:
        StartError: it is not there.
    """
    named = named_model(source, setting)
    if named == POCKET:
        return f"{source}, which comes with the code"
    if isinstance(named, Path):
        if next(named.glob("*.safetensors"), None) is None:
            raise StartError(f"{setting} is {source!r}, a directory without *.safetensors files.")
        return f"{source}, a directory"
    return f"{source}, which the first start fetches where the hub's cache lacks it"
