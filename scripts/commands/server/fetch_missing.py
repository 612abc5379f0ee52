"""Fetches a model before a server is started with it, as `hearth pull` does: seen, and checked."""

from pathlib import Path

from rich.console import Console

from hearth.shared.errors import StartError
from hearth.shared.models.local_models import local_models, matching_whole
from hearth.shared.models.model_path import ModelMissing, named_model
from hearth.shared.settings import Settings


def is_missing(source: str) -> bool:
    """Whether `source` is a model of the hub that is not whole on this disk.

    Raises:
        StartError: it names nothing that could be a model.
    """
    try:
        named = named_model(source, "MODEL")
    except ModelMissing:
        return True
    return not isinstance(named, Path) and not matching_whole(named, local_models())


def fetch_missing(source: str, settings: Settings, console: Console) -> None:
    """Have `source` on this disk; say on `console` what is fetched and how it fits.

    Raises:
        StartError: it is not to be had, or does not fit into this machine's memory.
    """
    if not is_missing(source):
        return
    # It imports MLX, which takes a second.
    from hearth.commands.models import pull_model
    from hearth.commands.models.hub_repository import ModelError

    try:
        status = pull_model.pull(pull_model.options_of([source]), settings, console)
    except ModelError as error:
        raise StartError(str(error)) from None
    if status:
        raise StartError(
            f"{source} does not fit into this machine's memory, and was not fetched. `hearth "
            f"models` lists what fits; `hearth pull {source} --anyway` fetches it all the same."
        )
