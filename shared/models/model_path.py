"""Tells what a setting names as a model: the builtin one, a directory, a hub id, an alias.

An alias of the catalogue stands for its hub id; the name of a model that another program keeps, or
the part of a name behind its owner, for that model. Loads nothing and asks no hub.
"""

from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.models.builtin_models import (
    BUILTIN,
    BUILTIN_MODELS,
    ModelMissing,
    builtin_model,
    catalogued,
    present_builtin,
)
from hearth.shared.models.local_models import HUB, local_models, matching_whole

_NOWHERE: Final = (
    "{setting} is {source!r}, which is neither a directory nor a hub id (owner/name), nor a name "
    "that `hearth models` lists."
)


def named_model(source: str, setting: str = "MODEL_PATH") -> Path | str:
    """Return the directory that `source` names, or else the hub id.

    A mistyped path is refused here, before a hub is asked for it. `setting` is where it is from.
    A name that the hub's cache has stays a hub id; what only another program has is a directory.

    Raises:
        ModelMissing: it is a builtin model that is not on this disk.
        StartError: it names nothing that could be a model.
    """
    if source.startswith(BUILTIN):
        builtin = builtin_model(source)
        if builtin is None:
            known = ", ".join(model.source for model in BUILTIN_MODELS)
            raise StartError(f"{setting} is {source!r}; the builtin models are {known}.")
        return present_builtin(builtin, setting)
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
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise StartError(_NOWHERE.format(setting=setting, source=source))
    return _known(source, setting)


def why_missing(source: str, setting: str = "MODEL_PATH") -> str:
    """Return what is told of `source` where it is a builtin model that is not on this disk; ""."""
    if builtin_model(source) is not None:  # of any other its load tells
        try:
            named_model(source, setting)
        except ModelMissing as missing:
            return str(missing)
    return ""


def _known(name: str, setting: str) -> Path | str:
    """Return what an alias, a hub id or the name of a model on this disk stands for."""
    builtin = builtin_model(name)
    if builtin is not None:
        return present_builtin(builtin, setting)
    model = catalogued(name)
    wanted = name.removesuffix(":latest") if model is None else model.hub_id
    found = matching_whole(wanted, local_models())
    if len(found) > 1:
        raise StartError(
            f"{setting} is {name!r}, which {len(found)} models on this disk are called: "
            f"{', '.join(each.name for each in found)}. Give the whole name of one."
        )
    if found:
        return found[0].name if found[0].place == HUB else found[0].directory
    if "/" not in wanted:
        raise StartError(_NOWHERE.format(setting=setting, source=name))
    return wanted


def check_model(source: str, setting: str = "MODEL_PATH") -> str:
    """Return a sentence about where the model is, without reading it.

    Raises:
        StartError: it is not there.
    """
    named = named_model(source, setting)
    if isinstance(named, Path):
        if next(named.glob("*.safetensors"), None) is None:
            raise StartError(f"{setting} is {source!r}, a directory without *.safetensors files.")
        return f"{source}, a directory"
    told = source if source == named else f"{source}, which is {named}"
    if matching_whole(named, local_models()):
        return f"{told}, which the hub's cache has"
    return f"{told}, which the first start fetches, as `hearth pull {source}` does"
