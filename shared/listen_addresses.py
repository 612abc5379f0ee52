"""Finds the addresses that the setting PROXY_HOST names; a host name may have several.

Standard library only: the installer imports it too.
"""

import functools
import ipaddress
import re
import socket
from typing import Final

from hearth.shared.errors import StartError

ADDRESSES_MAX: Final = 16  # per name; a machine has a few
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# The last label begins with a letter: 127.1 and 2130706433 are addresses in disguise.
_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?=[a-z]){_LABEL}\.?", re.IGNORECASE)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host_name(text: str) -> bool:
    return len(text) <= 253 and _NAME.fullmatch(text) is not None


# Kept for everybody: addresses of `PROXY_HOST`
@functools.lru_cache(maxsize=4)
def listen_addresses(host: str) -> tuple[str, ...]:
    """Return the addresses that a server on `host` listens on; a name is resolved once per process.

    The result is cached: the server binds the same addresses that were checked for an API key.
    localhost stands for 127.0.0.1 only: many containers resolve ::1 but have no IPv6.

    Raises:
        StartError: the name has no address here, or more than ADDRESSES_MAX.
    """
    if is_address(host):
        return (host,)
    if host == "localhost":
        return ("127.0.0.1",)
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"PROXY_HOST is {host}, for which this machine finds no address ({error}). Set it to a "
            "name that resolves here, to an address of this machine, or to localhost."
        ) from None
    found = tuple(dict.fromkeys(_address_text(info[4]) for info in infos))
    if len(found) > ADDRESSES_MAX:
        raise StartError(
            f"PROXY_HOST is {host}, which has {len(found)} addresses, and at most {ADDRESSES_MAX} "
            "are listened on. Set it to one of this machine's addresses."
        )
    return found


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the addresses of `host`. Raises: StartError."""
    return all(ipaddress.ip_address(address).is_loopback for address in listen_addresses(host))


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on `host`."""
    shown = host
    if is_address(host) and (address := ipaddress.ip_address(host)).is_unspecified:
        shown = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _address_text(address: tuple[object, ...]) -> str:
    """Return the text of a socket address; a link-local IPv6 address keeps its interface."""
    scope = address[3] if len(address) == 4 else 0
    text = str(address[0]).partition("%")[0]
    return f"{text}%{scope}" if scope else text
