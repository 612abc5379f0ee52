"""Removes a model from the hub's cache, or a builtin one.

    hearth rm qwen3.5-9b
    hearth rm smollm2
    hearth rm mlx-community/Qwen3.5-9B-MLX-4bit --yes   asks nothing

What LM Studio, oMLX or a directory of one's own holds is not removed: Hearth did not put it there.
Exit status 0: it is gone; 1: it is not, and why is told.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants

from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.models_in_use import is_in_use, sources_in_use
from hearth.commands.terminal_text import plain_lines
from hearth.shared.errors import StartError
from hearth.shared.models.local_models import HUB, local_models, matching
from hearth.shared.models.model_path import builtin_directory, builtin_model, catalogued, models_dir
from hearth.shared.paths import env_file
from hearth.shared.settings import Settings, load_settings


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth rm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="an alias, a hub id or a name that `hearth models` lists")
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    try:
        settings = load_settings(os.environ, env_file())
        return remove(cached_id(options.model), settings, is_sure=options.yes)
    except (ModelError, StartError) as error:
        print(plain_lines(error), file=sys.stderr)
        return 1


def remove(hub_id: str, settings: Settings, *, is_sure: bool) -> int:
    """Remove a repository from the hub's cache, with all its revisions and what came of files.

    `hub_id` may be a builtin model's source: then its own directory goes.

    Raises:
        ModelError: it is not there, is being served, cannot be removed, or nobody can be asked.
    """
    cache = Path(constants.HF_HUB_CACHE)
    builtin = builtin_model(hub_id)
    folder = _folder(cache, hub_id) if builtin is None else builtin.directory
    if folder is None or not folder.exists():
        where = f"the hub's cache ({cache})" if builtin is None else models_dir()
        raise ModelError(f"{hub_id} is not in {where}.")
    if folder.is_symlink():
        raise ModelError(
            f"{folder} is a link to {folder.resolve()}, which Hearth did not make. Remove both by "
            "hand."
        )
    if is_in_use(sources_in_use(settings.run_dir), folder, hub_id):
        raise ModelError(f"{hub_id} is being served. Stop the server, or serve another model.")
    nbytes = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    if not is_sure and not _is_agreed(f"Remove {hub_id} ({nbytes / 1e9:.1f} GB)? [y/N] "):
        print("Nothing was removed.")
        return 1
    try:
        (folder / "config.json").unlink(missing_ok=True)  # by which a builtin model is there
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(
            f"{folder} is not wholly removed ({error.strerror}: {error.filename}). Give this user "
            "access there, and remove it again."
        ) from error
    print(f"{hub_id} is removed: {nbytes / 1e9:.1f} GB are free again.")
    return 0


def _folder(cache: Path, hub_id: str) -> Path | None:
    """Return where the cache keeps a repository, whole or not, whatever the case of its name."""
    wanted = f"models--{hub_id.replace('/', '--')}".lower()
    folders = cache.iterdir() if cache.is_dir() else ()
    return next((each for each in folders if each.name.lower() == wanted), None)


def cached_id(name: str) -> str:
    """Return the id of the repository in the hub's cache that `name` means.

    Raises:
        ModelError: it means several, or one that another program keeps.
    """
    builtin = builtin_model(name)
    if builtin is not None and builtin_directory(builtin) in (None, builtin.directory):
        return builtin.source
    known = builtin or catalogued(name)
    wanted = name if known is None else known.hub_id
    found = matching(wanted, local_models())
    if len(found) > 1:
        raise ModelError(
            f"{name!r} is what several models are called: {', '.join(m.name for m in found)}. "
            "Give the whole name of one."
        )
    if found and found[0].program != HUB:
        raise ModelError(
            f"{found[0].name} is {found[0].program}'s ({found[0].directory}), and Hearth did not "
            f"put it there. Remove it in {found[0].program}."
        )
    return found[0].name if found else wanted


def _is_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ModelError("Nobody can be asked here. Give --yes to remove it.")
    return input(question).strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
