"""Judges the URLs of images and files in a body that goes to a cloud model.

Some providers fetch them, and for others LiteLLM does, from this machine: its network must not be
reached by a client's word. Here a URL is judged by its form; where LiteLLM fetches, it looks at the
address that a name leads to, which its setting `user_url_validation` must not turn off.
"""

import re
from typing import Any, Final

from hearth.proxy.images.prompt_images import URL_CHARS_MAX, is_public
from hearth.shared.errors import RequestError

# A host without a user before it, then what is printed of ASCII, without a backslash.
_URL: Final = re.compile(
    r"https://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::443)?(?:[/?#][!-\[\]-~]*)?", re.I | re.A
)
_HOST: Final = re.compile(r"(?:[a-z0-9_-]{1,63}\.)+[a-z][a-z0-9-]{1,62}\.?")
# Ends of names that lead to a machine of the local network, wherever they are known at all.
_LOCAL_ENDS: Final = frozenset(
    (
        *("localhost", "localdomain", "local", "internal", "intranet", "lan", "home", "corp"),
        *("private", "arpa", "test", "onion"),
    )
)


def check_url(value: Any, param: str, *_: Any) -> str:
    """Let pass a `data:` URL, and one over https to a name or an address of the internet.

    Raises:
        RequestError: 400; any other.
    """
    if type(value) is str and (value[:5].lower() == "data:" or is_public_url(value)):
        return value
    raise RequestError(
        f"{param} is neither a data: URL nor an https:// URL of a public host, and no other is "
        "sent to a cloud model. Send what it shows as a data: URL.",
        code="unsupported_content",
        param=param,
    )


def check_data(value: Any, param: str, *_: Any) -> str:
    """Let pass bare base64, and what `check_url` does. Raises: RequestError."""
    is_bare = type(value) is str and ":" not in value[:64]
    return value if is_bare else check_url(value, param)


def is_public_url(url: str) -> bool:
    """Return whether `url` is https, of a public host as far as its form tells."""
    found = _URL.fullmatch(url) if len(url) <= URL_CHARS_MAX else None
    host = found[1].lower() if found is not None else ""
    is_named = _HOST.fullmatch(host) and host.rstrip(".").rpartition(".")[2] not in _LOCAL_ENDS
    return bool(is_named) or is_public(host.strip("[]"))
