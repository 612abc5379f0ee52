"""Prints the contexts that fit and the KV that is kept, by model and Mac.

Nothing is timed and no Mac is needed: a model of its memory (scripts/harness/mac) counts, the
worker's own parts decide, with one worker and the default settings.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from hearth.shared.errors import StartError
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout
from scripts.harness.mac.mac_hardware import GB, MACS, Mac


def run(options: argparse.Namespace) -> None:
    logging.getLogger("hearth").setLevel(logging.ERROR)
    signs = "- = the model does not fit, ? = its caches are of no known kind"
    print(f"The context that is told, in tokens ({signs}):\n\n{context_table()}")
    print(f"\nKept KV, in GB:\n\n{room_table()}")


def context_table(macs: Sequence[Mac] = MACS, models: Sequence[ModelLayout] = LAYOUTS) -> str:
    """Return the context of each model on each Mac; "all" is the model's own."""

    def cell(worker: ImaginedWorker) -> str:
        tokens = worker.context()
        return f"{tokens:,}" + ("" if tokens < worker.model.context_tokens else " (all)")

    return _table(macs, models, cell)


def room_table(macs: Sequence[Mac] = MACS, models: Sequence[ModelLayout] = LAYOUTS) -> str:
    """Return how many GB of KV are kept beside each model on each Mac."""
    return _table(macs, models, lambda each: f"{each.room(each.context()).kept_bytes / GB:.1f}")


def _table(
    macs: Sequence[Mac], models: Sequence[ModelLayout], cell: Callable[[ImaginedWorker], str]
) -> str:
    """Return a Markdown table; `cell` says what a worker that has loaded tells of its model."""

    def filled(mac: Mac, model: ModelLayout) -> str:
        try:
            worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
            worker.start()
            return cell(worker)
        except StartError:
            return "-"
        except UnknownCache:
            return "?"

    rows = [
        ["Mac", *(model.name for model in models)],
        ["---"] * (len(models) + 1),
        *([f"{mac.memory_gb} GB", *(filled(mac, model) for model in models)] for mac in macs),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
