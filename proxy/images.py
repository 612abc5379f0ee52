"""Images that a request names: decoded from a `data:` URL, or fetched where that is allowed.

A URL in a request is an attacker's word: it may name this machine, its network or a cloud's
metadata service, directly, by redirect, or by a name that resolves to another address each time.
So what is checked is each address at the moment that it is connected to, and nothing else is
trusted. No path is ever opened: `file:` and all other schemes are refused by name.
"""

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import aiohttp
from aiohttp.abc import AbstractResolver

from shared.errors import RequestError

IMAGE_BYTES_MAX: Final = 20 * 1024 * 1024
FETCH_S_MAX: Final = 10.0  # from the name's lookup to the last byte, redirects included
REDIRECTS_MAX: Final = 3
FETCHES_MAX: Final = 8  # at once; more wait
URL_CHARS_MAX: Final = 4_096  # of an http(s) one

_PART_BYTES: Final = 64 * 1024
_DATA: Final = re.compile(r"data:image/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,80}){0,4};base64,", re.I)
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
# Of the addresses that IANA calls global: those that carry an IPv4 address to somewhere else.
_GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")
_TUNNELS: Final = (
    ipaddress.IPv6Network("2001::/23"),  # Teredo, ORCHID and others
    ipaddress.IPv6Network("2002::/16"),  # 6to4
    ipaddress.IPv6Network("3fff::/20"),  # documentation, which Python 3.11 takes for global
)
_RELAYS: Final = (ipaddress.IPv4Network("192.88.99.0/24"),)  # 6to4's


@dataclass(frozen=True, slots=True)
class Image:
    """An image as it came. Its pixels are not decoded: who decodes them bounds them."""

    media_type: str  # told by its first bytes, whatever else was claimed
    data: bytes


def is_public(address: str) -> bool:
    """Whether a numeric address is one of the internet's, and of no one network in particular.

    NAT64, IPv4-mapped, 6to4 and Teredo addresses are not: they lead to an IPv4 address that this
    machine cannot judge.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return not any(parsed in network for network in _RELAYS)
    return parsed in _GLOBAL_V6 and not any(parsed in network for network in _TUNNELS)


class Images:
    """Reads the images that requests name. Owner: the event loop; nothing is kept between calls.

    `counts` has an entry for every outcome: ok, and the code of each refusal.
    """

    def __init__(
        self,
        allows_urls: bool,
        is_allowed: Callable[[str], bool] = is_public,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """`allows_urls` is ALLOW_IMAGE_URLS; the other two are for tests."""
        self.counts: Counter[str] = Counter()
        self._allows_urls = allows_urls
        self._is_allowed = is_allowed
        self._resolver = resolver
        self._places = asyncio.Semaphore(FETCHES_MAX)

    async def read(self, url: str) -> Image:
        """Return the image that `url` holds or leads to.

        Raises:
            RequestError: 400; not an image, too large, too slow, not to be had from a public
                address, or a scheme that is not served. The text of an unreachable one does not
                say why: it would map the network that this server stands in.
        """
        try:
            image = await self._read(url)
        except RequestError as error:
            self.counts[error.code] += 1
            raise
        self.counts["ok"] += 1
        return image

    async def _read(self, url: str) -> Image:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _image(_decoded(url))
        if scheme not in ("http", "https"):
            _refuse("image_scheme", "An image is a data: URL with base64, or an http(s) URL.")
        if not self._allows_urls:
            _refuse(
                "image_urls_off",
                "This server fetches no images: send them as data: URLs, or start it with "
                "ALLOW_IMAGE_URLS=true.",
            )
        if len(url) > URL_CHARS_MAX:
            _refuse("image_url_too_long", f"An image's URL is over {URL_CHARS_MAX:,} characters.")
        async with self._places:
            try:
                return _image(await self._fetched(url))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                _refuse(
                    "image_unreachable",
                    f"An image could not be had from a public address within {FETCH_S_MAX:g} s "
                    f"and {REDIRECTS_MAX} redirects. Send it as a data: URL.",
                )

    async def _fetched(self, url: str) -> bytes:
        """Return what `url` leads to, at most IMAGE_BYTES_MAX. Raises what aiohttp raises."""
        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            socket_factory=self._socket,
            use_dns_cache=False,
            force_close=True,
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,  # a few bytes must not become many
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "image/*", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=FETCH_S_MAX),
                trust_env=False,  # a proxy would connect where we do not look
            ) as session,
            session.get(url, max_redirects=REDIRECTS_MAX, raise_for_status=True) as response,
        ):
            if (response.content_length or 0) > IMAGE_BYTES_MAX:
                _refuse_size()
            parts, size = [], 0
            async for part in response.content.iter_chunked(_PART_BYTES):
                size += len(part)
                if size > IMAGE_BYTES_MAX:
                    _refuse_size()
                parts.append(part)
            return b"".join(parts)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Return the socket that connects to one resolved address, each time that one is.

        Names, numbers in any notation, redirects and names that resolve anew all end here.

        Raises:
            OSError: the address is not allowed; aiohttp tries the name's next one.
        """
        family, kind, protocol, _, (host, *_) = address
        if not self._is_allowed(host):
            raise OSError("not a public address")
        return socket.socket(family, kind, protocol)


def _decoded(url: str) -> bytes:
    """Return what a `data:` URL holds."""
    head = _DATA.match(url, 0, 512)
    if head is None:
        _refuse("image_data_url", "A data: URL of an image is data:image/TYPE;base64,DATA.")
    if len(url) - head.end() > (IMAGE_BYTES_MAX + 2) // 3 * 4:
        _refuse_size()
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        _refuse("image_data_url", "The data: URL of an image is not valid base64.")


def _image(data: bytes) -> Image:
    for magic, media_type in _MAGIC:
        if data.startswith(magic):
            return Image(media_type, data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return Image("image/webp", data)
    _refuse("image_type", "An image is neither PNG, JPEG, GIF nor WebP.")


def _refuse_size() -> NoReturn:
    _refuse("image_too_large", f"An image is over {IMAGE_BYTES_MAX:,} bytes; send a smaller one.")


def _refuse(code: str, text: str) -> NoReturn:
    raise RequestError(text, code=code)
