"""Prints what workers on every Mac would tell MLX of their memory, the contexts that fit, kept KV.

Nothing is timed and no Mac is needed: a model of its memory (scripts/harness/mac) counts, the
worker's own parts decide.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest import mock

from hearth.shared.errors import StartError
from hearth.worker.engine.memory_reserve import working_bytes
from hearth.worker.setup import memory_setup
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.imagined_worker import ImaginedWorker
from scripts.harness.mac.mac_hardware import GB, MACS, Mac
from scripts.harness.mac.real_encoder_sizes import (
    EMBEDDER,
    LARGE_EMBEDDER,
    RANKER,
    XLM_EMBEDDER,
    RealEncoder,
)
from scripts.harness.mac.real_model_sizes import MODELS, RealModel
from scripts.harness.mac.worker_life import lead_through

ABOUT: Final = "what MLX is told of memory on Macs of 8 to 512 GB, contexts that fit, kept KV"
LARGE: Final = replace(MODELS[-1], name="70B, 48 * 10^9 bytes", weight_bytes=48 * 10**9)
ENCODERS: Final = (
    (),
    (EMBEDDER,),
    (EMBEDDER, RANKER),
    (XLM_EMBEDDER,),
    (LARGE_EMBEDDER,),
)
WORKERS_MAX: Final = 4
CHUNKS: Final = 20  # that each worker reads
LIFE_HEAD: Final = (
    *("Mac", "model", "workers", "limit GB", "set_memory_limit, GB", "most together, GB"),
    *("set_wired_limit, GB", "wired, GB", "KV in and out", "at the end"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("lives", "contexts", "rooms", "calls", "encoders"))
    parser.add_argument("--workers", type=int, default=WORKERS_MAX, help="of one server, at most")


def run(options: argparse.Namespace) -> None:
    logging.getLogger("hearth").setLevel(logging.ERROR)
    if options.only in (None, "calls"):
        print_calls()
    if options.only in (None, "encoders"):
        print_encoders()
    if options.only in (None, "lives"):
        print_lives(options.workers)
    if options.only in (None, "contexts"):
        print_contexts()
    if options.only in (None, "rooms"):
        print_rooms()


def print_encoders() -> None:
    """Print what large models have on a Mac of 64, beside models that embed and rank."""
    print("\nA large model on a Mac of 64 GB, beside EMBEDDING_MODEL and RERANK_MODEL (GB):\n")
    print(encoder_table())


def encoder_table() -> str:
    """Return the arithmetic of the budget, row by row, as docs/hardware.md has it."""
    head = ("model", "EMBEDDING_MODEL", "RERANK_MODEL", "both take", "workers' limit", "weights")
    rows = [[*head, "reserve", "context, tokens", "kept KV"], ["---"] * (len(head) + 3)]
    with TemporaryDirectory() as directory:
        rows += [
            _beside(Path(directory), model, *encoders)
            for model in (LARGE, MODELS[-1])
            for encoders in ENCODERS
        ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _beside(
    folder: Path,
    model: RealModel,
    embedder: RealEncoder | None = None,
    ranker: RealEncoder | None = None,
) -> list[str]:
    """Return the row of one pair of encoders; "-" where the model does not fit beside them."""
    sources = {"EMBEDDING_MODEL": embedder, "RERANK_MODEL": ranker}
    settings = {name: str(one.written(folder)) for name, one in sources.items() if one is not None}
    names = [model.name, *(one.name if one is not None else "none" for one in sources.values())]
    worker = ImaginedWorker(Mac("M4 Max", 64), model, Path("worker-0.sock"), **settings)
    limit = worker.memory.share.total
    sums = (worker.memory.encoders_bytes, limit, model.weight_bytes, working_bytes(limit))
    cells = [*names, *(f"{nbytes / GB:.1f}" for nbytes in sums)]
    try:
        worker.start()
        tokens = worker.context()
    except StartError:
        return [*cells, "-", "-"]
    return [*cells, f"{tokens:,}", f"{worker.room(tokens).kept_bytes / GB:.1f}"]


def print_calls() -> None:
    """Print each call of a real worker's life: a tiny model, batches, evictions, stop."""
    print("\nA real worker's calls (a tiny model on a Mac of 24 GB, bytes):\n")
    fake = FakeMac(Mac("M4", 24), is_imagined=True)
    with TemporaryDirectory() as directory:
        model = fixture_dir("qwen3", tiny=True)
        life = lead_through(fake, model, Path(directory), CACHE_RAM_BUDGET_MB="1")
    print_rows(("call", "bytes", "amid a forward", "thread"))
    for call in fake.calls:
        print_row(
            [call.name, f"{call.nbytes:,}", "yes" if call.is_computing else "no", call.thread]
        )
    print(f"\nanswers: {', '.join(life.ends)}; exit code: {life.exit_code}")


def print_lives(workers_max: int) -> None:
    """Print what servers of 1 to so many workers tell MLX, each with its largest model."""
    print("\nLives of servers with the largest model that they have room for: load, serve, stop:\n")
    print_rows(LIFE_HEAD)
    for mac in MACS:
        for count in range(1, workers_max + 1):
            model = largest(mac, count)
            print_row([f"{mac.memory_gb} GB", *([*lived(mac, model, count)] if model else ["-"])])


def largest(mac: Mac, count: int) -> RealModel | None:
    """Return the model of most bytes that a Mac serves with so many workers."""
    for model in sorted(MODELS, key=lambda model: -model.weight_bytes):
        if serves(server(mac, model, count)[0]):
            return model
    return None


def serves(workers: list[ImaginedWorker]) -> bool:
    """Whether there are workers, and a context fits into each."""
    try:
        return bool(workers) and all(worker.context() for worker in workers)
    except StartError:
        return False


def lived(mac: Mac, model: RealModel, count: int) -> Iterator[str]:
    """Lead a server through its life; yield the cells of its row."""
    workers, most = server(mac, model, count)
    for worker in workers:
        worker.serve(CHUNKS)
        most = max(most, sum(each.limit for each in workers))
    told = sum(worker.limit for worker in workers)
    residencies = [worker.fake.memory.residency for worker in workers]
    wired = sum(residency.wired_bytes for residency in residencies)
    moved = sum(r.entered.get("kv", 0) + r.left.get("kv", 0) for r in residencies)
    limits = {limit for w in workers for limit in w.fake.calls_of("set_memory_limit")}
    wires = workers[0].fake.calls_of("set_wired_limit")
    for worker in workers:
        worker.stop()
    rest = sum(residency.wired_bytes for residency in residencies)
    yield from (model.name, str(count), f"{workers[0].memory.share.total / GB:.1f}")
    yield ", ".join(f"{limit / GB:.1f}" for limit in sorted(limits)) + f" (sum {told / GB:.1f})"
    yield f"{most / GB:.1f}"
    yield ", ".join(f"{limit / GB:.3f}" for limit in wires)
    yield from (f"{wired / GB:.2f}", str(moved), f"{rest / GB:.1f} wired")


def server(mac: Mac, model: RealModel, count: int) -> tuple[list[ImaginedWorker], int]:
    """Return a server's workers, and the most that they were told together while they started.

    They start one after another, and then look at each other; there are none where they do not fit.
    """
    with TemporaryDirectory() as directory, mock.patch.object(memory_setup, "MEASURE_S", 0.0):
        sockets = [Path(directory) / f"worker-{number}.sock" for number in range(count)]
        workers = [ImaginedWorker(mac, model, path, WORKERS=str(count)) for path in sockets]
        most = 0
        try:
            for worker in workers:
                worker.start()
                most = max(most, sum(each.limit for each in workers))
            for worker in workers:
                worker.serve(0)
        except StartError:
            return [], 0
        return workers, most


def print_contexts() -> None:
    """Print the context that is told for each model on each Mac, and its share of the model's."""
    print("\nThe context that is told, one worker (tokens; - = the model does not fit):\n")
    print(context_table())


def context_table() -> str:
    """Return the context of each model on each Mac, as docs/hardware.md has it."""
    rows = [["Mac", *(model.name for model in MODELS)], ["---"] * (len(MODELS) + 1)]
    rows += [[f"{mac.memory_gb} GB", *(told(mac, model) for model in MODELS)] for mac in MACS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def told(mac: Mac, model: RealModel) -> str:
    worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
    try:
        worker.start()
        tokens = worker.context()
    except StartError:
        return "-"
    return f"{tokens:,}" + ("" if tokens < model.context else " (all)")


def print_rooms() -> None:
    """Print how much KV is kept beside each model on each Mac, and what idle live caches may take.

    All in GB, of one worker with the default settings.
    """
    print("\nKept KV / idle live caches at most, GB, one worker (- = the model does not fit):\n")
    print(room_table())


def room_table() -> str:
    """Return the parts of the room of each model on each Mac, as docs/hardware.md has them."""
    rows = [["Mac", *(model.name for model in MODELS)], ["---"] * (len(MODELS) + 1)]
    rows += [[f"{mac.memory_gb} GB", *(parts(mac, model) for model in MODELS)] for mac in MACS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parts(mac: Mac, model: RealModel) -> str:
    worker = ImaginedWorker(mac, model, Path("worker-0.sock"))
    try:
        worker.start()
        room = worker.room(worker.context())
    except StartError:
        return "-"
    return f"{room.kept_bytes / GB:.1f} / {room.idle_bytes / GB:.1f}"


def print_rows(head: Sequence[str]) -> None:
    print_row(head)
    print_row(["---"] * len(head))


def print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |")
