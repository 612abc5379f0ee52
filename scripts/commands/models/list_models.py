"""Lists the models on this disk, and those that are recommended for this machine.

    hearth models            name, place, size, context that fits here, what it takes
    hearth models --memory   and the sums of memory behind the contexts

Models are found in the hub's cache (HF_HOME), in LM Studio's folders and in oMLX's. Any name in the
first column can be MODEL_PATH, or `hearth serve --model`.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Final

from hearth.commands.models.memory_lines import memory_lines
from hearth.commands.models.model_capabilities import capabilities
from hearth.commands.models.running_server import served_names
from hearth.commands.server_client import table
from hearth.shared.errors import StartError
from hearth.shared.models.catalogue import LOOKED_UP, SOURCE, CatalogueModel, catalogued, fitting
from hearth.shared.models.local_models import HUB, FoundModel, local_models
from hearth.shared.models.model_path import named_model
from hearth.shared.paths import env_file
from hearth.shared.settings_from_env import POCKET, Settings, load_settings, public_name
from hearth.worker.engine.mlx_memory import machine_bytes
from hearth.worker.setup.memory_verdict import MemoryVerdict, memory_verdict

_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_HEAD: Final = ("model", "where", "GB", "context here", "takes", "")
_CATALOGUE_HEAD: Final = ("alias", "hub id", "GB", "for", "takes")


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
        print(error, file=sys.stderr)
        return 1
    models = local_models()
    served = served_names(settings)
    rows = [_pocket_row(served)]
    told = []
    for model in models:
        verdict = memory_verdict(model.directory, settings, model.weight_bytes)
        rows.append(_row(model, verdict, "served" if _is_served(model, settings, served) else ""))
        told += [f"\n{_shown(model.name)}", *memory_lines(verdict)] if options.memory else []
    print(table(_HEAD, rows))
    print(*told, sep="\n", end="\n" if told else "")
    print(f"\n{_recommended(models)}")
    return 0


def _row(model: FoundModel, verdict: MemoryVerdict, state: str) -> tuple[str, ...]:
    is_whole = model.is_whole
    if not is_whole:
        more = f"not whole: hearth pull {_shown(model.name)}" if model.place == HUB else "not whole"
        state = more
    size = f"{model.weight_bytes / 1e9:.1f}"
    takes = ", ".join(capabilities(model.directory)) if is_whole else ""
    return (_shown(model.name), model.place, size, _context(verdict), takes, state)


def _context(verdict: MemoryVerdict) -> str:
    if verdict.unknown:
        return "not known" if verdict.fits else "does not fit"
    return f"{verdict.context_tokens:,}" if verdict.fits else "does not fit"


def _is_served(model: FoundModel, settings: Settings, served: Sequence[str]) -> bool:
    """Whether one of the names that the server lists is this model's."""
    names = {model.name.lower(), model.directory.name.lower()}
    if (known := catalogued(model.name)) is not None:
        names.add(known.alias)
    try:
        named = named_model(settings.model_path)
    except StartError:
        named = ""
    if named in (model.directory, model.name):
        names.add(settings.model_name.lower())
    return not names.isdisjoint(name.lower() for name in served)


def _pocket_row(served: Sequence[str]) -> tuple[str, ...]:
    state = "served" if public_name(POCKET) in served else ""
    return (POCKET, "with the code", "0.0", "", "", state)


def _recommended(models: Sequence[FoundModel]) -> str:
    """Return the part of the catalogue that fits this machine and is not here."""
    here = {model.name.lower() for model in models}
    rows = [
        (model.alias, model.hub_id, f"{model.download_gb:.1f}", model.purpose, _takes(model))
        for model in fitting(machine_bytes())
        if model.hub_id.lower() not in here
    ]
    if not rows:
        return "The catalogue has nothing more for a machine of this size."
    head = f"For a machine of this size (looked up {LOOKED_UP}: {SOURCE}; none was run by us):"
    return "\n".join([head, table(_CATALOGUE_HEAD, rows), "Fetch one: hearth pull ALIAS"])


def _takes(model: CatalogueModel) -> str:
    return ", ".join(model.takes)


def _shown(name: str) -> str:
    """Return a name without what would move a terminal's cursor."""
    return _CONTROLS.sub("?", name)


if __name__ == "__main__":
    sys.exit(main())
