"""Makes errors fit to be shared: short, and without paths, addresses, hosts and users."""

import getpass
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CHARS_MAX: Final = 300
_PATH: Final = re.compile(
    r"(?<![\w{}/])~?/(?!v\d+/|v\d+\b)(?:[^\s/'\"<>|:,;()]+/)+([^\s/'\"<>|:,;()]*)"
)
_URL_HOST: Final = re.compile(r"\b(\w+)://[^\s/'\"]+")
_NAME_CHARS_MIN: Final = 3  # a shorter name is part of ordinary words


def error_text(error: BaseException | str, places: Mapping[Path, str]) -> str:
    """Return what went wrong as one short line; `places` are what stands for known paths.

    The end of a long text is kept: the log of a server that did not start ends with the cause.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}".rstrip(": ")
    text = " ".join(text.split())
    for place, name in places.items():
        for path in {str(place), str(place.resolve())}:
            text = text.replace(path, name)
    text = text.replace(str(Path.home()), "~")
    text = text.replace("file://", "")
    text = _URL_HOST.sub(r"\1://{host}", text)
    text = _PATH.sub(r"\1", text)
    for name, stands in ((platform.node(), "{host}"), (_user(), "{user}")):
        if len(name) >= _NAME_CHARS_MIN:
            text = re.sub(rf"\b{re.escape(name)}\b", stands, text)
    return text if len(text) <= CHARS_MAX else "... " + text[4 - CHARS_MAX :]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        return ""
