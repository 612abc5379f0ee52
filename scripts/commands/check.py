"""Says whether a start would succeed, and with what: packages, settings, model. Changes nothing.

    hearth check
    hearth check --model mlx-community/Qwen3-8B-4bit --port 4001

Exit status 0: the server would start; 1: a package is missing, or the port is not to be had; 78: it
cannot start as configured.
"""

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hearth.commands.serve import add_settings, port_of, settings_of
from hearth.proxy.gateway.routing_table import read_table
from hearth.proxy.request.model_names import models_of
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.shared.models.local_models import local_models, matching_whole
from hearth.shared.models.model_path import check_model, named_model, why_missing
from hearth.shared.paths import CODE_DIR, env_file
from hearth.shared.settings import setting_warnings, variables_in
from hearth.shared.version import VERSION

NEEDED: Final = ("mlx", "mlx_lm", "litellm", "fastapi", "uvicorn", "zmq", "llguidance")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    here = f"{platform.system()} on {platform.machine()}"
    print(f"Hearth    {VERSION} in {CODE_DIR}")
    print(f"Python    {platform.python_version()} in {sys.prefix}, {here}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"Packages  missing: {', '.join(missing)}. Install Hearth again.")
        return 1
    print(f"Images    {'for vision models' if has_vision() else f'refused: {VISION_REMEDY}'}")
    status = EXIT_CANNOT_START
    try:
        settings = settings_of(options)
        file = env_file()
        source = f"{file} and the environment" if file.is_file() else "the environment"
        print(f"Settings  model {settings.model_path}, workers {settings.workers}, from {source}")
        table = None
        if (config := settings.litellm_config) is not None:
            table = read_table(config, settings, os.environ, variables_in(file))
        names = table.variables if table is not None else ()
        for text in setting_warnings(os.environ, file, names):
            print(f"Warning   {text}")
        if table is not None:
            print(f"Gateway   {config}: {', '.join(table.listed)}")
        for model in models_of(settings):
            _check_type(model.path or settings.model_path)
            print(f"Model     {_found(model.path or settings.model_path)}")
        for about, other, setting in (
            ("Drafts   ", settings.draft_model, "DRAFT_MODEL"),
            ("Embedding", settings.embedding_model, "EMBEDDING_MODEL"),
            ("Reranking", settings.rerank_model, "RERANK_MODEL"),
        ):
            if other:
                print(f"{about} {_found(other, setting)}")
        status = 1
        print(f"Port      {port_of(settings, is_check=True)}")
    except StartError as error:
        print(error, file=sys.stderr)
        return status
    return 0


def _found(source: str, setting: str = "MODEL_PATH") -> str:
    """Return a sentence about the model, or why it is missing where a start succeeds without it.

    Raises:
        StartError: a start would not.
    """
    is_needed = setting == "DRAFT_MODEL"
    return (not is_needed and why_missing(source, setting)) or check_model(source, setting)


def _check_type(source: str) -> None:
    """Raise StartError if a model on this disk is of a type that no worker serves."""
    from hearth.worker.engine.model_library import library_of

    if why_missing(source):
        return
    named = named_model(source)
    found = matching_whole(named, local_models()) if isinstance(named, str) else ()
    directory = named if isinstance(named, Path) else found[0].directory if found else None
    try:
        if directory is not None:
            library_of(directory)
    except ValueError as error:
        text = f"MODEL_PATH is {source!r}, which cannot be loaded: {error}."
        raise StartError(text) from error


if __name__ == "__main__":
    sys.exit(main())
