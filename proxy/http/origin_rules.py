"""Decides which browser requests this server accepts: the Host and Origin rules, without any I/O.

A web page that the user happens to visit must not reach a server on the user's own machine. Such a
page can choose the Host header only by DNS rebinding, so no DNS name is accepted but localhost and
those in ALLOWED_HOSTS. A browser marks every cross-origin request that could do harm with an
Origin. Where a key is required, any Host will do, since such a page lacks the key.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final

from hearth.shared.errors import RequestError, StartError
from hearth.shared.listen_addresses import is_address, is_host_name, listen_addresses

_HOST: Final = re.compile(r"(\[[0-9a-f:.%]+\]|[^\[\]:@/\s]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_ORIGIN: Final = re.compile(
    r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\[\]:/\s]+)(?::([0-9]+|\*))?"
)
_WEB: Final = ("http", "https")  # anyone can publish pages under these schemes


class OriginRules:
    """Decides from a request's headers alone whether another site made the browser send it."""

    def __init__(
        self, bind_host: str, cors_origins: Iterable[str], allowed_hosts: Iterable[str] = ()
    ) -> None:
        """Raises: StartError: an entry of `cors_origins` or `allowed_hosts` is malformed."""
        self._bind = bind_host.lower()
        addresses = [ipaddress.ip_address(text) for text in listen_addresses(bind_host)]
        self._any_address = any(address.is_unspecified for address in addresses)
        own = {"localhost", _plain(self._bind), *map(str, addresses)}
        listed = [_allowed_host(text) for text in allowed_hosts]
        self._listed = frozenset(name for name in listed if not name.startswith("."))
        self._suffixes = tuple(name for name in listed if name.startswith("."))
        self._own = own | self._listed
        self._origins = [_origin_pattern(text) for text in cors_origins]

    def check_host(self, hosts: list[str], *, is_key_needed: bool = False) -> None:
        """Refuse (403) a request whose Host is none of this server's names.

        If the answer needs a key, any single Host will do.
        """
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            shown = ", ".join(hosts) or "missing"
            remedy = "Send one, with the name or address that this server is reached by."
        elif is_key_needed or self._is_ours(name):
            return
        else:
            shown = hosts[0]
            remedy = f"Add {name:.80} to ALLOWED_HOSTS to have it served under that name too."
        raise RequestError(
            f"The Host header is {shown!r:.120}; where no key is asked for, this server answers to "
            f"localhost, loopback addresses, {self._bind} and what ALLOWED_HOSTS lists. {remedy}",
            status=403,
            code="host_refused",
        )

    def _is_ours(self, name: str) -> bool:
        if name in self._own or self._is_listed(name):
            return True
        if not is_address(name):
            return False
        return ipaddress.ip_address(name).is_loopback or self._any_address

    def _is_listed(self, name: str) -> bool:
        return name in self._listed or (name.endswith(self._suffixes) and is_host_name(name))

    def check_origin(self, headers: Mapping[str, str], scheme: str, method: str) -> str | None:
        """Return the request's origin if CORS_ORIGINS lists it; None without another origin.

        Raises:
            RequestError: 403, a page from an origin that is not listed made this request.
        """
        origin = headers.get("origin")
        if origin is not None:
            if any(pattern.fullmatch(origin.lower()) for pattern in self._origins):
                return origin
            if self._is_own_page(origin.lower(), scheme, headers.get("host", "").lower()):
                return None
            raise self._refusal(origin)
        navigates = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigates:
            raise self._refusal("another site's page")
        return None

    def _is_own_page(self, origin: str, scheme: str, host: str) -> bool:
        """Return whether `origin` is this server's own, perhaps behind TLS under a listed name."""
        if origin == f"{scheme}://{host}":
            return True
        name = _host_name(host)
        return name is not None and self._is_listed(name) and origin == f"https://{host}"

    @staticmethod
    def _refusal(origin: str) -> RequestError:
        return RequestError(
            f"Requests from {origin!r:.120} are refused; add its origin to CORS_ORIGINS to let "
            "its pages use this server.",
            status=403,
            code="origin_refused",
        )


def _host_name(host: str) -> str | None:
    match = _HOST.fullmatch(host.strip())
    return _plain(match[1].strip("[]").lower()) if match else None


def _plain(name: str) -> str:
    """Return `name` in its normal form: mac.local. becomes mac.local, and ::0 becomes ::."""
    return str(ipaddress.ip_address(name)) if is_address(name) else name.removesuffix(".")


def _allowed_host(text: str) -> str:
    """Return the name or address in `text`; for a pattern its suffix, such as .local for *.local.

    Raises:
        StartError: `text` is neither.
    """
    name = text.lower().removeprefix("*.")
    if is_host_name(name):
        return text.lower().removeprefix("*").removesuffix(".")
    if is_address(text.strip("[]")):
        return _plain(text.strip("[]").lower())
    raise StartError(
        f"ALLOWED_HOSTS holds {text!r}; allowed are names and addresses without scheme and port, "
        "such as host.docker.internal, mac.local or 192.168.1.5, and patterns such as *.local, "
        "which hold a name behind the star."
    )


def _origin_pattern(text: str) -> re.Pattern[str]:
    """Return the regex that an origin must match in full; `text` may have * for host or port.

    Raises:
        StartError: `text` is no origin, or it would let in every page of the web.
    """
    match = _ORIGIN.fullmatch(text.rstrip("/").lower())
    scheme, host, port = match.groups() if match else ("", "", "")
    rest = host.removeprefix("*.") if host != "*" else ""
    is_name = is_host_name(rest) or is_address(rest.strip("[]"))
    if match is None or "*" in rest or (scheme in _WEB and not is_name):
        raise StartError(
            f"CORS_ORIGINS holds {text!r}; allowed are origins such as http://localhost:3000, and "
            "patterns such as http://localhost:*, https://*.example.com and, of schemes that no "
            "page of the web has, app://* and vscode-webview://*."
        )
    if host == "*":
        return re.compile(re.escape(f"{scheme}://") + r"[^/\s]+")
    some = r"[^/:@\s]+\." if host.startswith("*.") else ""
    any_port = {None: "", "*": "(:[0-9]{1,5})?"}
    behind = any_port.get(port, f":{port}")
    return re.compile(re.escape(f"{scheme}://") + some + re.escape(rest) + behind)
