"""Joins the processes of all ranks to one group of MLX, through which tensors travel.

MLX reads from the environment how, and takes no more than one group for the life of a process.
Source: mlx.launch, which sets the same variables.
"""

import faulthandler
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.worker.ranks.transport.rank_hosts import RankHost

# MLX connects with Python's lock held: a rank that comes too late would hold all threads for ever.
# Less than the silence after which a supervisor takes the worker for hung.
JOIN_S_MAX: Final = 10.0
# The ranks that connect first do so when the others listen: MLX tries again a second later only.
LISTEN_FIRST_S: Final = 0.1
PORTS: Final = range(20_000, 32_000)  # below those that systems give to connections
MISSING: Final = {
    "ring": "MLX has no ring here. Reinstall mlx.",
    "jaccl": (
        "MLX has no RDMA (jaccl) here. It needs macOS 26.2 and RDMA over Thunderbolt, enabled in "
        "recovery mode; without rdma in the file of RANK_HOSTS tensors take TCP."
    ),
}
PORT_TRIES_MAX: Final = 100


def plan_tensors(hosts: Sequence[RankHost], are_local: Sequence[bool]) -> dict[str, Any]:
    """Return how the tensors of one start travel; each start has ports of its own.

    That is by RDMA (JACCL) where the hosts have devices for it, else by TCP (MLX's ring).

    Raises:
        StartError: the hosts have not what the backend needs.
    """
    if not any(device for host in hosts for device in host.rdma):
        return {"backend": "ring", "addresses": _ring_addresses(hosts, are_local)}
    devices = _devices(hosts)
    port = _free_port(hosts[0].name, is_local=True)
    return {"backend": "jaccl", "coordinator": f"{hosts[0].name}:{port}", "devices": devices}


def _ring_addresses(hosts: Sequence[RankHost], are_local: Sequence[bool]) -> list[list[str]]:
    counts = {len(host.addresses) for host in hosts}
    if len(counts) > 1:
        raise StartError(
            "RANK_HOSTS: each rank needs as many ips as the others: one a cable to the next rank."
        )
    if any(":" in address for host in hosts for address in host.addresses):
        raise StartError("RANK_HOSTS: MLX's ring takes IPv4 addresses only; name those in ips.")
    return [
        [f"{address}:{_free_port(address, is_local=local)}" for address in host.addresses]
        for host, local in zip(hosts, are_local, strict=True)
    ]


def _free_port(address: str, *, is_local: bool) -> int:
    """Return a port that nobody listens at; on another machine, one that hardly anybody does."""
    for port in random.SystemRandom().sample(PORTS, PORT_TRIES_MAX):
        if not is_local:
            return port
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                reason = error.strerror
            else:
                return port
    raise StartError(f"RANK_HOSTS: no port of {address} can be had on this machine ({reason}).")


def _devices(hosts: Sequence[RankHost]) -> list[list[Any]]:
    rows = [list(host.rdma) for host in hosts]
    is_square = all(len(row) == len(hosts) for row in rows)
    if not is_square or any(row[rank] is not None for rank, row in enumerate(rows)):
        raise StartError(
            "RANK_HOSTS: RDMA needs an rdma list of every rank: the device that leads to each "
            "rank, null for itself. mlx.distributed_config writes such a file."
        )
    return rows


def join_group(tensors: dict[str, Any], rank: int, size: int) -> Any:
    """Return MLX's group of all ranks, once all of them are joined. Inference or main thread.

    Where that takes longer than JOIN_S_MAX the process ends.

    Raises:
        StartError: it cannot be joined; the text says why.
    """
    import mlx.core as mx

    backend = tensors["backend"]
    if not mx.distributed.is_available(backend):
        raise StartError(MISSING[backend])
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= _environment(tensors, rank, Path(directory) / "ranks.json")
        if rank == size - 1:
            time.sleep(LISTEN_FIRST_S)
        faulthandler.dump_traceback_later(JOIN_S_MAX, exit=True)
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except (RuntimeError, ValueError) as error:
            raise StartError(f"MLX cannot connect the ranks ({backend}): {error}") from None
        finally:
            faulthandler.cancel_dump_traceback_later()
    return group


def _environment(tensors: dict[str, Any], rank: int, file: Path) -> dict[str, str]:
    """Return what MLX reads, after writing `file` where it reads that too."""
    if tensors["backend"] == "ring":
        file.write_text(json.dumps(tensors["addresses"]))
        return {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
    file.write_text(json.dumps(tensors["devices"]))
    names = ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR")
    return dict(zip(names, (str(rank), str(file), tensors["coordinator"]), strict=True))
