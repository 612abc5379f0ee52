"""Reads the machines of the ranks, and joins the ranks to one group for tensors.

The host file has mlx.launch's format. Messages between ranks are encrypted, but tensors are not:
MLX sends them in clear to whichever process connects first. A rank's addresses must therefore be
loopback or private.
MLX reads its configuration from the environment, and a process can join only one group.
Source: mlx.launch, which sets the same variables.
"""

import faulthandler
import ipaddress
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.shared.private_files import read_small_file

LOOPBACK: Final = "127.0.0.1"
HOST_FILE_BYTES_MAX: Final = 1 << 20
PRIVATE_NETWORKS: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("127.0.0.0/8", "::1/128"),  # this machine
            *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),  # RFC 1918, 4193
            *("169.254.0.0/16", "fe80::/10"),  # link-local, as on a Thunderbolt bridge
            "100.64.0.0/10",  # shared address space: overlay networks
        ),
    )
)


@dataclass(frozen=True, slots=True)
class RankHost:
    """The machine of one rank."""

    addresses: tuple[str, ...]  # for tensors; the first one names the machine
    rdma: tuple[Any, ...] = ()  # the devices that lead to each rank, as JACCL reads them

    @property
    def name(self) -> str:
        return self.addresses[0]


def read_hosts(path: Path | None, count: int) -> tuple[RankHost, ...]:
    """Return the hosts of `count` ranks; without a file, all ranks are on this machine.

    Raises:
        StartError: the file cannot be read, does not name `count` ranks, or has an address that is
            not private.
    """
    if path is None:
        return (RankHost((LOOPBACK,)),) * count
    try:
        content = json.loads(read_small_file(path, HOST_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"RANK_HOSTS: {path} cannot be read: {error}.") from None
    entries = content.get("hosts") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise StartError(
            f'RANK_HOSTS: {path} is neither a list of hosts nor {{"hosts": [...]}}, as mlx.launch '
            "reads it."
        )
    if len(entries) != count:
        raise StartError(
            f"RANK_HOSTS: {path} names {len(entries)} ranks and RANKS is {count}. Make both the "
            "same."
        )
    return tuple(
        _host(entry, f"RANK_HOSTS: {path}, rank {rank}") for rank, entry in enumerate(entries)
    )


def _host(entry: Any, where: str) -> RankHost:
    if not isinstance(entry, dict):
        raise StartError(f'{where} is {entry!r:.80}; needed is {{"ips": ["192.168.2.1"]}}.')
    addresses = entry.get("ips") or [entry.get("ssh")]  # mlx.launch accepts an address in ssh
    if not isinstance(addresses, list) or not isinstance(entry.get("rdma", []), list):
        raise StartError(f"{where}: ips and rdma are lists.")
    for address in addresses:
        check_address(address, where)
    return RankHost(tuple(addresses), tuple(entry.get("rdma", [])))


def check_address(text: Any, where: str) -> None:
    """Check that `text` is one address of a private network; errors begin with `where`.

    Raises:
        StartError: `text` is no address, a wildcard address, or a public address.
    """
    try:
        address = ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        address = None
    if address is None:
        raise StartError(
            f"{where}: {text!r:.80} is no IP address. Name the address of the interface that "
            "tensors shall take, as 192.168.2.1."
        )
    if not any(address in network for network in PRIVATE_NETWORKS):
        raise StartError(
            f"{where}: {address} is not private, and tensors travel in clear. Use an address of a "
            "cable or network of your own (127.*, 10.*, 172.16-31.*, 192.168.*, 169.254.*, "
            "100.64-127.*, fc00::/7, fe80::/10)."
        )


def are_local(hosts: tuple[RankHost, ...]) -> tuple[bool, ...]:
    """Return for each rank whether it is on rank 0's machine and is thus started by rank 0."""
    return tuple(host.name == hosts[0].name for host in hosts)


# MLX connects while it holds the GIL, so that a missing rank would block all threads for ever. The
# limit is below the silence after which a supervisor takes the worker for hung.
JOIN_S_MAX: Final = 10.0
# The connecting rank waits until the others listen: MLX retries only after a second.
LISTEN_FIRST_S: Final = 0.1
PORTS: Final = range(20_000, 32_000)  # below the systems' ephemeral ports
MISSING: Final = {
    "ring": "MLX has no ring here. Reinstall mlx.",
    "jaccl": (
        "MLX has no RDMA (jaccl) here. It needs macOS 26.2 and RDMA over Thunderbolt, enabled in "
        "recovery mode; without rdma in the file of RANK_HOSTS tensors take TCP."
    ),
}
PORT_TRIES_MAX: Final = 100


def plan_tensors(hosts: Sequence[RankHost], are_local: Sequence[bool]) -> dict[str, Any]:
    """Return the transport of tensors for one start, with new ports.

    It is RDMA (JACCL) if the hosts name devices for it, else TCP (MLX's ring).

    Raises:
        StartError: the hosts lack what the backend needs.
    """
    if not any(device for host in hosts for device in host.rdma):
        return {"backend": "ring", "addresses": _ring_addresses(hosts, are_local)}
    devices = [list(host.rdma) for host in hosts]
    is_square = all(len(rank_devices) == len(hosts) for rank_devices in devices)
    if not is_square or any(
        rank_devices[rank] is not None for rank, rank_devices in enumerate(devices)
    ):
        raise StartError(
            "RANK_HOSTS: RDMA needs an rdma list of every rank: the device that leads to each "
            "rank, null for itself. mlx.distributed_config writes such a file."
        )
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
    """Return a free port; on another machine a random port, which is probably free."""
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


def join_group(tensors: dict[str, Any], rank: int, size: int) -> Any:
    """Return MLX's group of all ranks once all have joined. Inference or main thread.

    The process ends if joining takes longer than JOIN_S_MAX.

    Raises:
        StartError: MLX cannot connect the ranks; the text says why.
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
    """Write MLX's configuration into `file`; return the variables that MLX reads."""
    if tensors["backend"] == "ring":
        file.write_text(json.dumps(tensors["addresses"]))
        return {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
    file.write_text(json.dumps(tensors["devices"]))
    names = ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR")
    return dict(zip(names, (str(rank), str(file), tensors["coordinator"]), strict=True))
