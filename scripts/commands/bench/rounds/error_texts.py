"""Makes errors fit to be shared: short, and without paths, addresses, hosts and users."""

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hearth.commands.bench.checked_json import shown_text
from hearth.commands.bench.user_name import user_name
from hearth.shared.paths import without_home

CHARS_MAX: Final = 300
_READ_CHARS_MAX: Final = 10_000
_PATH: Final = re.compile(
    r"(?<![\w{}/])~?/(?!v\d+/|v\d+\b)(?:[^\s/'\"<>|:,;()]+/)+([^\s/'\"<>|:,;()]*)"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_URL_HOST: Final = re.compile(r"\b(\w+)://[^\s/'\"]+")
# IPv4 but loopback and "all", IPv6 and MAC.
_ADDRESS: Final = re.compile(
    r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}\b"
    r"|\b[0-9a-fA-F]{1,4}(?:::?[0-9a-fA-F]{1,4}){3,7}\b"
)
_ANYBODYS: Final = {
    *("localhost", "mac", "macbook", "imac", "linux", "ubuntu", "debian", "fedora"),
    *("home", "root", "tmp", "user", "users", "data", "dir", "model", "environments"),
}
_NAME_CHARS_MIN: Final = 3  # a shorter name is part of ordinary words


def error_text(error: BaseException | str, places: Mapping[Path, str]) -> str:
    """Return what went wrong as one short line; `places` are what stands for known paths.

    The end of a long text is kept: the log of a server that did not start ends with the cause.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}".rstrip(": ")
    text = " ".join(_COLOUR.sub("", text[-_READ_CHARS_MAX:]).split())
    for place, name in places.items():
        for path in {str(place), str(place.resolve())}:
            text = text.replace(path, name)
    text = _URL_HOST.sub(r"\1://{host}", without_home(text).replace("file://", ""))
    text = _ADDRESS.sub("{host}", _PATH.sub(r"\1", text))
    node = platform.node()
    names = [(node, "{host}"), (node.partition(".")[0], "{host}"), (user_name(), "{user}")]
    for name, stands in (*names, (Path.home().name, "{user}")):
        if len(name) >= _NAME_CHARS_MIN and name.lower() not in _ANYBODYS:
            text = re.sub(rf"\b{re.escape(name)}\b", stands, text, flags=re.IGNORECASE)
    text = shown_text(text)
    return text if len(text) <= CHARS_MAX else "... " + text[4 - CHARS_MAX :]
