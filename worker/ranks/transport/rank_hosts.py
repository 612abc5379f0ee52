"""Reads on which machine each rank is, from a host file as mlx.launch has it.

What ranks tell each other is encrypted; the tensors inside the model are not: MLX sends them as
they are, to whoever connects first. So a rank's addresses are loopback or of a private network.
"""

import ipaddress
import json
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
            *("169.254.0.0/16", "fe80::/10"),  # link-local, as a Thunderbolt bridge gives itself
            "100.64.0.0/10",  # shared address space: overlay networks
        ),
    )
)


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where one rank is."""

    addresses: tuple[str, ...]  # for tensors; the first one names the machine
    rdma: tuple[Any, ...] = ()  # the devices that lead to each rank, as JACCL reads them

    @property
    def name(self) -> str:
        return self.addresses[0]


def read_hosts(path: Path | None, count: int) -> tuple[RankHost, ...]:
    """Return the hosts of `count` ranks; without a file all are on this machine.

    Raises:
        StartError: the file cannot be read, names other than `count` ranks, or an address that is
            not private.
    """
    if path is None:
        return (RankHost((LOOPBACK,)),) * count
    try:
        content = json.loads(read_small_file(path, HOST_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"RANK_HOSTS: {path} cannot be read: {error}.") from None
    rows = content.get("hosts") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise StartError(
            f'RANK_HOSTS: {path} is neither a list of hosts nor {{"hosts": [...]}}, as mlx.launch '
            "reads it."
        )
    if len(rows) != count:
        raise StartError(
            f"RANK_HOSTS: {path} names {len(rows)} ranks and RANKS is {count}. Make both the same."
        )
    return tuple(_host(row, f"RANK_HOSTS: {path}, rank {rank}") for rank, row in enumerate(rows))


def _host(row: Any, place: str) -> RankHost:
    if not isinstance(row, dict):
        raise StartError(f'{place} is {row!r:.80}; needed is {{"ips": ["192.168.2.1"]}}.')
    addresses = row.get("ips") or [row.get("ssh")]  # mlx.launch takes a host named by its address
    if not isinstance(addresses, list) or not isinstance(row.get("rdma", []), list):
        raise StartError(f"{place}: ips and rdma are lists.")
    for address in addresses:
        check_address(address, place)
    return RankHost(tuple(addresses), tuple(row.get("rdma", [])))


def check_address(text: Any, place: str) -> None:
    """Refuse what is not one address of this machine's private networks.

    Raises:
        StartError: it is no address, is any address (a wildcard), or is a public one.
    """
    try:
        address = ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        address = None
    if address is None:
        raise StartError(
            f"{place}: {text!r:.80} is no IP address. Name the address of the interface that "
            "tensors shall take, as 192.168.2.1."
        )
    if not any(address in network for network in PRIVATE_NETWORKS):
        raise StartError(
            f"{place}: {address} is not private, and tensors travel in clear. Use an address of a "
            "cable or network of your own (127.*, 10.*, 172.16-31.*, 192.168.*, 169.254.*, "
            "100.64-127.*, fc00::/7, fe80::/10)."
        )


def are_local(hosts: tuple[RankHost, ...]) -> tuple[bool, ...]:
    """Tell of each rank whether it is on rank 0's machine, which starts it then."""
    return tuple(host.name == hosts[0].name for host in hosts)
