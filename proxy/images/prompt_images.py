"""Puts images into a prompt: reads each image of its messages once, and names it by its digest.

`data:` URLs are decoded; http(s) URLs are fetched if the settings allow it. A URL in a request is
not trusted: it may lead to this machine, its network or a cloud's metadata service, directly, by a
redirect, or by a name that resolves to another address each time. So each address is checked when a
connection to it is opened. No path is ever opened: `file:` and all other schemes are refused.

Large images do not block the event loop: they are decoded in a thread, one at a time, in slices
between which the loop can run.
"""

import asyncio
import importlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:  # a quarter of the proxy's start, which only a server that fetches images pays
    from aiohttp.abc import AbstractResolver

from hearth.proxy.http.base64_data import decode_base64
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

IMAGES_MAX: Final = 100  # images in one request; repeated images count again
IMAGES_BYTES_MAX: Final = 48 * 1024 * 1024  # bytes of a request's distinct images
IMAGES_WAIT_S_MAX: Final = 60.0  # time for all images of a request, waiting for a slot included
IMAGE_BYTES_MAX: Final = 20 * 1024 * 1024
DIGEST_BYTES: Final = 16
FETCH_S_MAX: Final = 10.0  # time from the name's lookup to the last byte, redirects included
REDIRECTS_MAX: Final = 3
FETCHES_MAX: Final = 8  # fetches at once; further ones wait
URL_CHARS_MAX: Final = 4_096  # characters of an http(s) URL

_PART_BYTES: Final = 64 * 1024
_SHOWN_CHARS: Final = 40  # characters of a wrong URL, in the error text
_DATA: Final = re.compile(r"data:image/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,80}){0,4};base64,", re.I)
_MAGIC: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")  # WebP: see `_image`
_GLOBAL_V6: Final = ipaddress.IPv6Network("2000::/3")
# Networks in _GLOBAL_V6 that are not public, or that lead to an embedded IPv4 address.
_TUNNELS: Final = (
    ipaddress.IPv6Network("2001::/23"),  # Teredo, ORCHID and others
    ipaddress.IPv6Network("2002::/16"),  # 6to4
    ipaddress.IPv6Network("3fff::/20"),  # documentation, which Python 3.11 takes for global
)
_RELAYS: Final = (ipaddress.IPv4Network("192.88.99.0/24"),)  # relays of 6to4


@dataclass(frozen=True, slots=True)
class NamedImage:
    """The file of an image. The pixels are decoded, and limited, by the worker."""

    data: bytes
    digest: str  # digest of `data`, in hex


def is_public(address: str) -> bool:
    """Return whether a numeric address is a public one of the internet.

    NAT64, IPv4-mapped, 6to4 and Teredo addresses do not count as public: they lead to an embedded
    IPv4 address.
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


class ImageFetcher:
    """Decodes or fetches images. Owner: the event loop; nothing is kept between calls."""

    def __init__(
        self,
        allows_urls: bool,
        is_allowed: Callable[[str], bool] = is_public,
        resolver: "AbstractResolver | None" = None,
    ) -> None:
        """`allows_urls` is ALLOW_IMAGE_URLS; the other two parameters are for tests."""
        self._allows_urls = allows_urls
        self._aiohttp: Any = importlib.import_module("aiohttp") if allows_urls else None
        self._is_allowed = is_allowed
        self._resolver = resolver
        self._fetch_slots = asyncio.Semaphore(FETCHES_MAX)
        self._reader = asyncio.Semaphore(1)  # a second thread would slow the event loop down

    async def read(self, url: str) -> NamedImage:
        """Return the image in a data: URL, or the one that an http(s) URL leads to.

        Raises:
            RequestError: 400; not an image, too large, too slow, not at a public address, or a
                scheme that is not served. The text for an unreachable image does not say why, since
                that would reveal this server's network.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            async with self._reader:
                return await asyncio.to_thread(lambda: _image(_decoded(url)))
        if scheme not in ("http", "https"):
            _refuse(
                "image_scheme",
                "An image is a data: URL with base64, or an http(s) URL; this one begins with "
                f"{url[:_SHOWN_CHARS]!r}. Before bare base64 put data:image/png;base64,",
            )
        if not self._allows_urls:
            _refuse(
                "image_urls_off",
                "This server fetches no images: send them as data: URLs, or start it with "
                "ALLOW_IMAGE_URLS=true.",
            )
        if len(url) > URL_CHARS_MAX:
            _refuse(
                "image_url_too_long",
                f"An image's URL has {len(url):,} characters and this server accepts "
                f"{URL_CHARS_MAX:,}. Send the image as a data: URL.",
            )
        async with self._fetch_slots:
            try:
                data = await self._fetched(url)
            except (self._aiohttp.ClientError, OSError, TimeoutError, ValueError):
                _refuse(
                    "image_unreachable",
                    f"An image could not be had from a public address within {FETCH_S_MAX:g} s "
                    f"and {REDIRECTS_MAX} redirects. Send it as a data: URL.",
                )
        async with self._reader:
            return await asyncio.to_thread(_image, data)

    async def _fetched(self, url: str) -> bytes:
        """Return the bytes at `url`, at most IMAGE_BYTES_MAX. Raises what aiohttp raises."""
        aiohttp = self._aiohttp
        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            socket_factory=self._socket,
            use_dns_cache=False,
            force_close=True,
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,  # a small reply must not expand to a huge one
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "image/*", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=FETCH_S_MAX),
                trust_env=False,  # with an HTTP proxy the address could not be checked
            ) as session,
            session.get(url, max_redirects=REDIRECTS_MAX, raise_for_status=True) as response,
        ):
            if (response.content_length or 0) > IMAGE_BYTES_MAX:
                _refuse_size(f"{response.content_length:,} bytes")
            parts, size = [], 0
            async for part in response.content.iter_chunked(_PART_BYTES):
                size += len(part)
                if size > IMAGE_BYTES_MAX:
                    _refuse_size("more bytes")
                parts.append(part)
            return b"".join(parts)

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Return a socket for one resolved address; aiohttp calls this at every connection.

        Names, numbers in any notation, redirects and names that resolve anew all come here.

        Raises:
            OSError: the address is not allowed; aiohttp tries the name's next one.
        """
        family, kind, protocol, _, (host, *_) = address
        if not self._is_allowed(host):
            raise OSError("not a public address")
        return socket.socket(family, kind, protocol)


def _decoded(url: str) -> bytes:
    """Return the bytes in the `data:` URL of an image. Any thread. Raises: RequestError."""
    head = _DATA.match(url, 0, 512)
    if head is None:
        _refuse(
            "image_data_url",
            "A data: URL of an image is data:image/TYPE;base64,DATA; this one begins with "
            f"{url[:_SHOWN_CHARS].partition(',')[0]!r}.",
        )
    if (chars := len(url) - head.end()) > (IMAGE_BYTES_MAX + 2) // 3 * 4:
        _refuse_size(f"{chars // 4 * 3:,} bytes")
    try:
        return decode_base64(url, head.end())
    except ValueError as error:
        _refuse(
            "image_data_url",
            f"The data: URL of an image is not valid base64 ({error}). Send it padded, without "
            "line breaks, in the alphabet with + and /.",
        )


def _image(data: bytes) -> NamedImage:
    """Return the image in `data`; its first bytes must show an image. Any thread."""
    if not (data.startswith(_MAGIC) or (data[:4], data[8:12]) == (b"RIFF", b"WEBP")):
        _refuse(
            "image_type",
            "An image is neither PNG, JPEG, GIF nor WebP, whatever it is called: it begins with "
            f"{data[:8].hex(' ') or 'nothing'}. Send it as one of these.",
        )
    return NamedImage(data, blake2b(data, digest_size=DIGEST_BYTES).hexdigest())


def _refuse_size(measured: str) -> NoReturn:
    _refuse(
        "image_too_large",
        f"An image has {measured} and this server accepts {IMAGE_BYTES_MAX:,}. Send a smaller one.",
    )


def _refuse(code: str, text: str) -> NoReturn:
    raise RequestError(text, code=code)


# ------------------------------------------------------------ all images of a prompt


def shows_images(prompt: Prompt) -> bool:
    return any(_image_parts(prompt))


async def with_images(prompt: Prompt, images: ImageFetcher, hold: Callable[[int], None]) -> Prompt:
    """Return `prompt` with the files of its images.

    `hold` is called with the size of each distinct file, and may raise. If the caller is cancelled,
    or an image is refused, only the decoding of one slice goes on.

    Raises:
        RequestError: there are too many images, they are too large or too slow together, or one
            cannot be read; the error names the field.
    """
    params = _params_by_url(prompt)
    files: dict[str, bytes] = {}

    async def read(url: str, param: str) -> str:
        try:
            image = await images.read(url)
        except RequestError as error:
            raise RequestError(f"{param}: {error}", code=error.code, param=param) from None
        if image.digest not in files:
            hold(len(image.data))
            files[image.digest] = image.data
            if (count := sum(map(len, files.values()))) > IMAGES_BYTES_MAX:
                raise RequestError(
                    f"The images of this request, as far as {param}, are {count:,} bytes together "
                    f"and this server accepts {IMAGES_BYTES_MAX:,}. Send fewer, or smaller ones.",
                    code="images_too_large",
                    param=param,
                )
        return image.digest

    tasks = {url: asyncio.create_task(read(url, param)) for url, param in params.items()}
    try:
        async with asyncio.timeout(IMAGES_WAIT_S_MAX):
            await asyncio.gather(*tasks.values())
    except TimeoutError:
        cut_off = [param for url, param in params.items() if tasks[url].cancelled()]
        late, *_ = cut_off or params.values()
        raise RequestError(
            f"{late}: The images of this request were not all here within {IMAGES_WAIT_S_MAX:g} s. "
            "Send them as data: URLs, or fewer.",
            code="images_too_slow",
            param=late,
        ) from None
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    digests = {url: task.result() for url, task in tasks.items()}
    messages = [
        message | {"content": [_named(part, digests) for part in message["content"]]}
        if type(message["content"]) is list
        else message
        for message in prompt.messages
    ]
    first: dict[str, str] = {}
    for url, digest in digests.items():
        first.setdefault(digest, params[url])
    return replace(prompt, messages=messages, images=files, places=first)


def _image_parts(prompt: Prompt) -> Iterator[dict[str, Any]]:
    for message in prompt.messages:
        if type(message["content"]) is list:
            yield from (part for part in message["content"] if part["type"] == "image")


def _params_by_url(prompt: Prompt) -> dict[str, str]:
    """Return the first field of each image, by the image's URL."""
    params: dict[str, str] = {}
    for count, part in enumerate(_image_parts(prompt), start=1):
        params.setdefault(part["url"], part["param"])
        if count > IMAGES_MAX:
            raise RequestError(
                f"The request shows over {IMAGES_MAX} images, which is what this server accepts. "
                "Send fewer.",
                code="too_many_images",
                param=part["param"],
            )
    return params


def _named(part: dict[str, Any], digests: dict[str, str]) -> dict[str, Any]:
    """Return `part`, an image with its digest in place of its URL."""
    return {"type": "image", "image": digests[part["url"]]} if part["type"] == "image" else part
