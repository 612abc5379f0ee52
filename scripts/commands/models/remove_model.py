"""Removes a model from the hub's cache.

    hearth rm qwen3.5-9b
    hearth rm mlx-community/Qwen3.5-9B-MLX-4bit --yes   asks nothing

What LM Studio, oMLX or a directory of one's own holds is not removed: Hearth did not put it there.
Exit status 0: it is gone; 1: it is not, and why is told.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir

from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.running_server import served_names
from hearth.shared.errors import StartError
from hearth.shared.models.catalogue import catalogued
from hearth.shared.models.local_models import HUB, local_models, matching
from hearth.shared.paths import env_file
from hearth.shared.settings_from_env import Settings, load_settings


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
        print(error, file=sys.stderr)
        return 1


def remove(hub_id: str, settings: Settings, *, is_sure: bool) -> int:
    """Remove a repository from the hub's cache, with all its revisions and what came of files.

    Raises:
        ModelError: it is not there, is being served, or nobody can be asked.
    """
    known = catalogued(hub_id)
    names = {hub_id.lower(), known.alias if known else ""}
    if not names.isdisjoint(name.lower() for name in served_names(settings)):
        raise ModelError(f"{hub_id} is being served. Stop the server, or serve another model.")
    cache = Path(constants.HF_HUB_CACHE)
    found = scan_cache_dir(cache) if cache.is_dir() else None
    repositories = [each for each in (found.repos if found else ()) if each.repo_type == "model"]
    repository = next((r for r in repositories if r.repo_id.lower() == hub_id.lower()), None)
    if found is None or repository is None:
        raise ModelError(f"{hub_id} is not in the hub's cache ({cache}).")
    strategy = found.delete_revisions(*(each.commit_hash for each in repository.revisions))
    partial = sum(path.stat().st_size for path in repository.repo_path.rglob("*.incomplete"))
    nbytes = strategy.expected_freed_size + partial
    if not is_sure and not _is_agreed(f"Remove {hub_id} ({nbytes / 1e9:.1f} GB)? [y/N] "):
        print("Nothing was removed.")
        return 1
    strategy.execute()
    print(f"{hub_id} is removed: {nbytes / 1e9:.1f} GB are free again.")
    return 0


def cached_id(name: str) -> str:
    """Return the id of the repository in the hub's cache that `name` means.

    Raises:
        ModelError: it means several, or one that another program keeps.
    """
    known = catalogued(name)
    wanted = name if known is None else known.hub_id
    found = matching(wanted, local_models())
    if len(found) > 1:
        raise ModelError(
            f"{name!r} is what several models are called: {', '.join(m.name for m in found)}. "
            "Give the whole name of one."
        )
    if found and found[0].place != HUB:
        raise ModelError(
            f"{found[0].name} is {found[0].place}'s ({found[0].directory}), and Hearth did not put "
            f"it there. Remove it in {found[0].place}."
        )
    return found[0].name if found else wanted


def _is_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ModelError("Nobody can be asked here. Give --yes to remove it.")
    return input(question).strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
