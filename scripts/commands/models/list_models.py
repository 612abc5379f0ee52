"""Lists the models on this disk, and those that are recommended for this machine.

    hearth models            name, place, size, context that fits here, what it takes
    hearth models --memory   and the sums of memory behind the contexts

Models are found in the hub's cache (HF_HOME), in LM Studio's folders and in oMLX's, builtin ones in
~/.hearth/models (HEARTH_MODELS_DIR). Any name in the first column can be MODEL_PATH, or `hearth
serve --model`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from hearth.commands.models.memory_lines import encoder_sentence, memory_lines
from hearth.commands.models.model_capabilities import capabilities, encoder_kind
from hearth.commands.models.models_in_use import is_in_use, sources_in_use
from hearth.commands.server_client import table
from hearth.commands.terminal_text import plain, plain_lines
from hearth.proxy.request.encoder_names import SETTINGS, EncoderKind
from hearth.shared.errors import StartError
from hearth.shared.models.local_models import HUB, FoundModel, local_models
from hearth.shared.models.model_path import (
    BUILTIN_MODELS,
    LOOKED_UP,
    SOURCE,
    BuiltinModel,
    CatalogueModel,
    builtin_directory,
    fitting,
)
from hearth.shared.paths import env_file
from hearth.shared.settings import load_settings
from hearth.worker.engine.mlx_memory import machine_bytes
from hearth.worker.memory_verdict import MemoryVerdict, memory_verdict
from hearth.worker.setup.memory_setup import process_bytes

BUILTIN_PLACE: Final = "package index"
_HEAD: Final = ("model", "where", "GB", "context here", "takes", "")
_CATALOGUE_HEAD: Final = ("alias", "hub id", "GB", "by row", "for", "takes")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--memory", action="store_true", help="tell the sums of memory too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    try:
        settings = load_settings(os.environ, env_file())
    except StartError as error:
        print(plain_lines(error), file=sys.stderr)
        return 1
    models = [*_builtin_models(), *local_models()]
    in_use = sources_in_use(settings.run_dir)
    rows = [_missing_row(model) for model in BUILTIN_MODELS if builtin_directory(model) is None]
    told, tables = [], []
    for model in models:
        kind = encoder_kind(model.directory, model.name)
        verdict = memory_verdict(model.directory, settings, model.weight_bytes)
        lines = memory_lines(verdict) if kind is None else [_encoder_line(kind, model)]
        hub_id = model.name if model.program == HUB else ""
        is_served = is_in_use(in_use, model.directory, hub_id)
        context = _context(verdict) if kind is None else "none"
        takes = capabilities(model.directory) if kind is None else (f"{kind}, {SETTINGS[kind]}",)
        rows.append(_row(model, context, takes, "served" if is_served else ""))
        told += [f"\n{plain(model.name)}", *lines] if options.memory else []
        if verdict.tables.nbytes:
            tables.append(f"{plain(model.name)}: {verdict.tables.sentence}")
    print(table(_HEAD, rows), *tables, sep="\n")
    print(*told, sep="\n", end="\n" if told else "")
    print(f"\n{_recommended(models)}")
    return 0


def _row(model: FoundModel, context: str, takes: Sequence[str], state: str) -> tuple[str, ...]:
    name, is_whole = plain(model.name), model.is_whole
    if not is_whole:
        state = f"not whole: hearth pull {name}" if model.program == HUB else "not whole"
    size = f"{model.weight_bytes / 1e9:.1f}"
    return (name, model.program, size, context, ", ".join(takes) if is_whole else "", state)


def _encoder_line(kind: EncoderKind, model: FoundModel) -> str:
    nbytes = process_bytes([model.directory], model.weight_bytes)
    source = model.name if model.program == BUILTIN_PLACE else model.source
    return encoder_sentence(kind, source, nbytes)


def _context(verdict: MemoryVerdict) -> str:
    if verdict.refused:
        return "not served"
    if verdict.unknown:
        return "not known" if verdict.fits else "does not fit"
    return f"{verdict.context_tokens:,}" if verdict.fits else "does not fit"


def _builtin_models() -> list[FoundModel]:
    """Return the builtin models that are on this disk."""
    found = [(model.source, builtin_directory(model)) for model in BUILTIN_MODELS]
    return [FoundModel(name, directory, BUILTIN_PLACE) for name, directory in found if directory]


def _missing_row(model: BuiltinModel) -> tuple[str, ...]:
    size = f"{model.member_bytes / 1e9:.1f}"
    return (model.source, BUILTIN_PLACE, size, "", "", f"hearth pull {model.name}")


def _recommended(models: Sequence[FoundModel]) -> str:
    """Return the part of the catalogue that fits this machine and is not here."""
    here = {model.name.lower() for model in models}
    rows = [
        _catalogue_row(model)
        for model in fitting(machine_bytes())
        if model.hub_id.lower() not in here
    ]
    if not rows:
        return "The catalogue has nothing more for a machine of this size."
    head = f"For a machine of this size (looked up {LOOKED_UP}: {SOURCE}; none was run by us):"
    return "\n".join([head, table(_CATALOGUE_HEAD, rows), "Fetch one: hearth pull ALIAS"])


def _catalogue_row(model: CatalogueModel) -> tuple[str, ...]:
    by_row = f"{model.table_gb:.1f}" if model.table_bytes else ""
    sizes, takes = (f"{model.download_gb:.1f}", by_row), ", ".join(model.takes)
    return (model.alias, model.hub_id, *sizes, model.purpose, takes)


if __name__ == "__main__":
    sys.exit(main())
