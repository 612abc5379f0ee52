"""Explains failed connections that macOS's permission prompts may have caused.

Local Network privacy (since macOS 15) asks when a program connects to a neighbour, and the firewall
asks when a program listens. Without an answer the connection fails, with no other sign.
Source: Apple's technote TN3179.
"""

import errno
import os
import sys
from typing import Final

from hearth.shared.listen_addresses import is_loopback

MACOS: Final = "darwin"

# launchd daemons (but not agents) and Apple's Terminal (but no other terminal) are exempt.
_LOCAL_NETWORK: Final = (
    "On macOS 15 and newer this is also what a program gets that may not use the local network. "
    "Allow Python, or the app that started Hearth, in System Settings > Privacy & Security > Local "
    "Network; or start Hearth from Terminal or over ssh, and leave that open, or as a launchd "
    "daemon."
)
_FIREWALL_THERE: Final = (
    "If the worker's machine is a Mac, its firewall may be asking there whether Python may accept "
    "connections: allow it in System Settings > Network > Firewall > Options."
)


def refused_hint(error: OSError, platform: str = sys.platform) -> str:
    """Return why this machine may not reach another one, and the remedy; "" if none is known.

    `error` is the failure of the connection; a TimeoutError is an OSError too.
    """
    if platform != MACOS:
        return ""
    if error.errno == errno.EHOSTUNREACH:
        return f"Connecting gives {os.strerror(errno.EHOSTUNREACH)!r}. {_LOCAL_NETWORK}"
    if isinstance(error, TimeoutError):
        return f"Connecting gets no answer. {_FIREWALL_THERE}"
    return ""


def listening_hint(host: str, program: str, platform: str = sys.platform) -> str:
    """Return what to do if clients cannot reach `program` on `host`; "" without a firewall."""
    if platform != MACOS or is_loopback(host):
        return ""
    tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    return (
        f"listening on {host}: where macOS's firewall is on, it asks once, in a window, whether "
        "Python may accept connections, and drops them until then. Without a screen: "
        f"sudo {tool} --add {program} && sudo {tool} --unblockapp {program}"
    )
