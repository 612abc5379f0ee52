"""Images that a request names: no address of this machine or its network is ever connected to."""

import asyncio
import base64
import binascii
import contextlib
import gzip
import ipaddress
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st

from hearth.proxy.http import base64_data
from hearth.proxy.images import prompt_images
from hearth.proxy.images.prompt_images import ImageFetcher, NamedImage, is_public
from hearth.shared.errors import RequestError

pytestmark = pytest.mark.process

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels" * 100
LOOPBACK = "127.0.0.1"

# What IANA's two special-purpose registries hold, and what carries an IPv4 address elsewhere.
NOT_PUBLIC = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32"),
    *("::/128", "::1/128", "::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48"),
    *("100::/64", "2001::/32", "2001:2::/48", "2001:db8::/32", "2002::/16", "3fff::/20"),
    *("5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "4000::/3"),
]
NETWORKS = [ipaddress.ip_network(text) for text in NOT_PUBLIC]


@given(st.sampled_from(NETWORKS), st.integers(0, 2**128 - 1))
def test_no_address_of_a_special_network_is_public(network: Any, chosen: int) -> None:
    address = network[chosen % network.num_addresses]
    assert not is_public(str(address))
    if address.version == 4:
        for wrapped in (
            f"::ffff:{address}",
            str(ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) + int(address))),
            str(ipaddress.IPv6Address((0x2002 << 112) + (int(address) << 80) + 1)),
        ):
            assert not is_public(wrapped)


@pytest.mark.parametrize(
    ("addresses", "is_open"),
    [
        (("fe80::1%1", "", "localhost", "1.2.3", "0x7f.1", "2130706433"), False),
        (("1.1.1.1", "93.184.215.14", "2606:4700:4700::1111"), True),
    ],
)
def test_only_a_plain_address_of_the_internet_is_public(
    addresses: tuple[str, ...], is_open: bool
) -> None:
    assert {is_public(address) for address in addresses} == {is_open}


# ---------------------------------------------------------------- a server to fetch from

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Names(AbstractResolver):
    """Resolves every name to the next of `answers`, the last for good. Asks no DNS."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=each,
                port=port,
                family=socket.AF_INET6 if ":" in each else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for each in answer.split(",")
        ]

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def site(handler: Handler) -> AsyncIterator[Any]:
    """Serve `handler` on loopback; give its port, and the paths at which it was reached."""
    reached: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        reached.append(request.path)
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    async with TestServer(app, host=LOOPBACK) as server:
        yield SimpleNamespace(port=server.port, reached=reached)


async def png(request: web.Request) -> web.StreamResponse:
    return web.Response(body=PNG, content_type="text/html")


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def code_of(reader: ImageFetcher, url: str) -> str:
    return asyncio.run(refusal(reader, url)).code


async def refusal(reader: ImageFetcher, url: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await reader.read(url)
    assert caught.value.status == 400
    return caught.value


async def test_urls_are_off_unless_allowed_and_then_the_seam_lets_the_tests_server_through() -> (
    None
):
    async with site(png) as server:
        url = f"http://{LOOPBACK}:{server.port}/a.png"
        assert (await refusal(ImageFetcher(allows_urls=False), url)).code == "image_urls_off"
        assert server.reached == []
        reader = ImageFetcher(True, is_allowed=lambda address: address == LOOPBACK)
        assert await reader.read(url) == NamedImage(PNG, digest(PNG))
        assert server.reached == ["/a.png"]


SPELLINGS = ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0"]
SPELLINGS += ["[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "127.0.0.1.", "user:word@127.0.0.1"]


@pytest.mark.parametrize("host", SPELLINGS)
async def test_loopback_in_any_spelling_is_never_connected_to(host: str) -> None:
    async with site(png) as server:
        error = await refusal(ImageFetcher(True), f"http://{host}:{server.port}/")
        assert error.code == "image_unreachable"
        assert server.reached == []


@pytest.mark.parametrize(
    "target",
    [
        *("http://127.0.0.1:{port}/", "http://localhost:{port}/", "//127.0.0.1:{port}/inner"),
        *("file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1:{port}/"),
    ],
)
async def test_a_redirect_from_a_public_address_to_the_inside_is_not_followed(target: str) -> None:
    """The outer address stands for a public one; only the inner server must not be reached."""
    async with site(png) as inner:

        async def redirect(request: web.Request) -> web.StreamResponse:
            raise web.HTTPFound(target.format(port=inner.port))

        async with site(redirect) as outer:
            seen: list[str] = []

            def only_first(address: str) -> bool:
                seen.append(address)
                return len(seen) == 1  # as is_public would for a public, then a private one

            reader = ImageFetcher(True, is_allowed=only_first)
            error = await refusal(reader, f"http://{LOOPBACK}:{outer.port}/")
            assert error.code == "image_unreachable"
            assert outer.reached == ["/"] and inner.reached == []


async def test_a_name_that_resolves_anew_to_the_inside_before_its_use_is_not_connected_to() -> None:
    """DNS rebinding: whatever was said before, the address that is connected to is checked."""

    async def again(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"http://rebound.example:{server.port}/second")

    async with site(again) as server:
        checked: list[str] = []

        def outside(address: str) -> bool:
            checked.append(address)
            return address == LOOPBACK  # stands for the public address

        names = Names(LOOPBACK, "192.168.1.1")
        reader = ImageFetcher(True, is_allowed=outside, resolver=names)
        error = await refusal(reader, f"http://rebound.example:{server.port}/first")
        assert error.code == "image_unreachable"
        assert names.asked == ["rebound.example"] * 2, "a cached answer would not be checked"
        assert checked == [LOOPBACK, "192.168.1.1"]
        assert server.reached == ["/first"]


@pytest.mark.parametrize("answer", ["127.0.0.1", "::ffff:127.0.0.1", "127.0.0.1,10.0.0.1"])
async def test_a_public_name_that_resolves_to_the_inside_is_not_connected_to(answer: str) -> None:
    async with site(png) as server:
        reader = ImageFetcher(True, resolver=Names(answer))
        error = await refusal(reader, f"http://images.example:{server.port}/")
        assert error.code == "image_unreachable"
        assert server.reached == []


async def test_a_proxy_from_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(png) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{LOOPBACK}:{server.port}")
        await refusal(ImageFetcher(True, is_allowed=lambda _: True), f"http://{LOOPBACK}:1/")
        assert server.reached == []


async def test_what_cannot_be_reached_is_told_alike_whatever_the_reason() -> None:
    """Else a client could map the network by the texts of its refusals."""

    async def missing(request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound()

    async with site(missing) as server:
        reader = ImageFetcher(True)
        closed = ImageFetcher(True, is_allowed=lambda _: True)
        texts = {
            str(await refusal(ImageFetcher(True), f"http://{LOOPBACK}:{server.port}/")),
            str(await refusal(reader, "http://nowhere.invalid/")),
            str(await refusal(closed, f"http://{LOOPBACK}:1/")),
            str(
                await refusal(
                    ImageFetcher(True, is_allowed=lambda _: True),
                    f"http://{LOOPBACK}:{server.port}/",
                )
            ),
        }
        assert len(texts) == 1


async def fetched(handler: Handler) -> str:
    """Return the code of the refusal of what `handler` serves as an image."""
    async with site(handler) as server:
        reader = ImageFetcher(True, is_allowed=lambda _: True)
        return (await refusal(reader, f"http://{LOOPBACK}:{server.port}/")).code


async def test_a_body_without_an_end_is_cut_off_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_images, "IMAGE_BYTES_MAX", 100_000)
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(PNG + b"x" * 50_000)
                sent += 50_000
        return response

    assert await fetched(endless) == "image_too_large"
    assert sent < 20_000_000


async def test_a_claimed_length_over_the_limit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_images, "IMAGE_BYTES_MAX", 1_000)

    async def large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000000"})
        await response.prepare(request)
        await asyncio.sleep(0.5)
        return response

    assert await fetched(large) == "image_too_large"


async def test_a_slow_answer_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_images, "FETCH_S_MAX", 0.4)

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                await response.write(PNG)
                await asyncio.sleep(0.1)
        return response

    began = time.monotonic()
    assert await fetched(drip) == "image_unreachable"
    assert time.monotonic() - began < 8, "the whole answer takes 10"


async def test_redirects_in_a_circle_end() -> None:
    asked = 0

    async def circle(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        raise web.HTTPFound("/again")

    assert await fetched(circle) == "image_unreachable"
    assert asked <= prompt_images.REDIRECTS_MAX + 1


async def test_a_compressed_bomb_is_not_unpacked() -> None:
    async def bomb(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        packed = gzip.compress(PNG + bytes(50_000_000))
        assert len(packed) < 60_000
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    assert await fetched(bomb) == "image_type"


@pytest.mark.parametrize("body", [b"", b"<svg onload=alert(1)>", b"%PDF-1.7", b"RIFF1234WAVE"])
async def test_what_calls_itself_an_image_and_is_none_is_refused(body: bytes) -> None:
    async def lies(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="image/png")

    assert await fetched(lies) == "image_type"


# ---------------------------------------------------------------- data: and everything else


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0jpeg", "image/jpeg"),
        (b"GIF89a..", "image/gif"),
        (b"RIFF1234WEBPVP8 ", "image/webp"),
    ],
)
def test_a_data_url_is_read_whatever_type_it_claims(data: bytes, media_type: str) -> None:
    for claimed in (media_type, "image/x-any", "IMAGE/PNG;charset=utf-8"):
        read = asyncio.run(ImageFetcher(allows_urls=False).read(data_url(data, claimed)))
        assert read == NamedImage(data, digest(data))


def test_a_data_url_over_the_limit_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_images, "IMAGE_BYTES_MAX", len(PNG))
    assert asyncio.run(ImageFetcher(False).read(data_url(PNG))).data == PNG
    assert code_of(ImageFetcher(False), data_url(PNG + b"xyz")) == "image_too_large"

    def decode(*_: Any, **__: Any) -> bytes:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(binascii, "a2b_base64", decode)
    assert code_of(ImageFetcher(False), data_url(PNG) + "A" * 4_000) == "image_too_large"


BASE64 = st.text("ABz09+/=", max_size=40) | st.binary(max_size=40).map(
    lambda data: base64.b64encode(data).decode()
)


@given(st.lists(BASE64, max_size=4).map("".join), st.integers(1, 5))
def test_slices_of_base64_are_read_as_the_whole_is(text: str, quads: int) -> None:
    """What is refused as a whole is refused in slices, and what is read is the same."""
    head = base64.b64encode(PNG[:9]).decode()
    try:
        whole = base64.b64decode(head + text, validate=True)
    except binascii.Error:
        whole = None
    with mock.patch.object(base64_data, "_SLICE_CHARS", 4 * quads):
        try:
            read = asyncio.run(ImageFetcher(False).read(f"data:image/png;base64,{head}{text}")).data
        except RequestError:
            read = None
    is_padded_well = len(head + text) % 4 == 0 and not text.endswith("===")
    assert read == (whole if is_padded_well else None)


@given(st.text(max_size=60))
def test_any_text_behind_data_is_an_image_or_a_refusal(text: str) -> None:
    for url in (f"data:{text}", f"data:image/png;base64,{text}", f"DATA:image/png;{text},"):
        with contextlib.suppress(RequestError):
            assert asyncio.run(ImageFetcher(False).read(url)).data


@pytest.mark.parametrize(
    "url",
    [
        *("{path}", "file://{path}", "FILE://{path}", "file:{path}", " file://{path}"),
        *("../../{path}", "~/{path}", "\\\\host\\share\\x.png", "C:\\x.png", "x" * 100_000),
        *("ftp://127.0.0.1/x", "gopher://127.0.0.1/", "unix:///x", "jar:file://{path}!/", ""),
        *("http:{path}", "http://", "https://[", "http://\x00/", "http:// /", "http://a\r\nb/"),
        *(f"data:image/png;base64,!{base64.b64encode(PNG).decode()}",),
        *("data:", "data:,x", "data:text/plain;base64,eA==", "data:image/png,%89PNG"),
        *("data:image/png;base64,====", "data:image/png;base64,iVBORw0KGgo\n", "\ud800"),
    ],
)
def test_no_path_and_no_other_scheme_opens_anything(url: str, tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(PNG)
    opened = audit_opens()
    assert code_of(ImageFetcher(True), url.format(path=path)).startswith("image_")
    assert not [name for name in opened() if "secret" in name or "share" in name], opened()


_opened: list[str] | None = None


def audit_opens() -> Callable[[], list[str]]:
    """Return what gives the paths opened in this process from now on."""
    global _opened
    if _opened is None:

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and _opened is not None:
                _opened.append(str(arguments[0]))

        sys.addaudithook(audit)  # for good: there is no way to take one back
    _opened = []
    return lambda: list(_opened or ())
