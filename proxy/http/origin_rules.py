"""Decides who may talk to this server from a browser: the Host and Origin rules, without any I/O.

A web page that the user happens to visit must not reach a server on the user's own machine. A page
can not choose the Host it is sent under except by DNS (rebinding), hence no DNS name but localhost;
and a browser marks every cross-origin request that could do harm with an Origin.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final

from hearth.shared.errors import RequestError, StartError

_HOST: Final = re.compile(r"(\[[0-9a-f:.%]+\]|[^\[\]:@/]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)


class OriginRules:
    """Decides from a request's headers alone whether a browser may have been tricked into it."""

    def __init__(self, bind_host: str, cors_origins: Iterable[str]) -> None:
        """Raises: StartError: one of `cors_origins` is not an origin."""
        self._bind = bind_host.lower()
        self._any_address = _is_wildcard(bind_host)
        self._listed = frozenset(_origin(text) for text in cors_origins)

    def check_host(self, hosts: list[str]) -> None:
        """Refuse (403) a request that was not addressed to loopback or to the bind address."""
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self._is_ours(name):
            shown = ", ".join(hosts) or "missing"
            raise RequestError(
                f"The Host header is {shown!r:.120}; this server answers to localhost, loopback "
                f"addresses and {self._bind}.",
                status=403,
                code="host_refused",
            )

    def _is_ours(self, name: str) -> bool:
        if name in ("localhost", self._bind):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._any_address

    def check_origin(self, headers: Mapping[str, str], scheme: str, method: str) -> str | None:
        """Return the listed origin that the answer may be shown to; None where there is none.

        Raises:
            RequestError: 403, a page from an origin that is not listed made this request.
        """
        origin = headers.get("origin")
        if origin is not None:
            if origin.lower() in self._listed:
                return origin
            if origin.lower() == f"{scheme}://{headers.get('host', '')}".lower():
                return None
            raise self._refusal(origin)
        navigates = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not navigates:
            raise self._refusal("another site's page")
        return None

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
    return match[1].strip("[]").lower() if match else None


def _is_wildcard(bind_host: str) -> bool:
    return bind_host != "localhost" and ipaddress.ip_address(bind_host).is_unspecified


def _origin(text: str) -> str:
    text = text.rstrip("/").lower()
    if not _ORIGIN.fullmatch(text):
        raise StartError(
            f"CORS_ORIGINS holds {text!r}; allowed are origins such as http://localhost:3000."
        )
    return text
