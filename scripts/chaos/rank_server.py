"""Starts a Hearth whose worker is one or more ranks, and finds the processes of its ranks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psutil

from scripts.chaos.own_server import OwnServer

FOLLOWER: Final = "hearth.worker.ranks.follower_main"
WORKER: Final = "hearth.worker.main"


def rank_settings(model: Path, ranks: int, **more: str) -> dict[str, str]:
    """Return the settings of a server of `ranks` that decodes greedily."""
    return {
        "MODEL_PATH": str(model),
        "PROXY_MODEL_ID": "m",
        "RANKS": str(ranks),
        "DEFAULT_TEMPERATURE": "0",
        "DEFAULT_REPETITION_PENALTY": "1",
        **more,
    }


@asynccontextmanager
async def rank_server(model: Path, ranks: int, **more: str) -> AsyncIterator[OwnServer]:
    """Yield a server that is ready; it is ended, and its directory removed, with the block."""
    server = OwnServer(rank_settings(model, ranks, **more))
    try:
        await server.started()
        yield server
    finally:
        server.close()


def url_of(server: OwnServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def worker_of(server: OwnServer) -> psutil.Process:
    """Return the process of rank 0."""
    return next(each for each in server.look()[1:] if WORKER in " ".join(each.cmdline()))


def followers_of(server: OwnServer) -> list[psutil.Process]:
    """Return the processes of ranks 1 and above, in their order."""
    children = worker_of(server).children(recursive=True)
    return [child for child in children if FOLLOWER in " ".join(child.cmdline())]
