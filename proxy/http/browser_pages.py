"""Serves the files of pages to browsers, which it signs in with a key and then knows by a cookie.

A page can send no header with a form or an event stream, and must not keep a key where scripts read
it. So it carries a cookie: a random token that stands for a key. The cookie is good below the
paths of this server's own pages only: a browser gives it to every server on this host.
"""

import secrets
import time
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from hearth.proxy.http.api_keys import ClientKeys
from hearth.proxy.http.http_exchange import HttpExchange, RawHeaders
from hearth.shared.errors import RequestError

PATHS: Final = ("/chat", "/dashboard")  # below which the cookie is sent
SIGN_IN_S: Final = 12 * 3600.0  # a sign-in is good for so long
SIGN_INS_MAX: Final = 64  # of a key; of one more its oldest ends, and nobody else's
FORM_BYTES_MAX: Final = 4096
POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
HTML: Final = b"text/html; charset=utf-8"
_TYPES: Final = {
    ".html": HTML,
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


def page_headers(policy: str = POLICY) -> RawHeaders:
    """Return what each reply to a page has, whatever it says."""
    return [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-dns-prefetch-control", b"off"),  # a link's host may hold what a model was told
        (b"referrer-policy", b"same-origin"),  # not no-referrer: a form's Origin would be null
        (b"cache-control", b"no-store"),
    ]


class PageFiles:
    """The files of one directory, read once. A value that nobody changes."""

    def __init__(self, directory: Path, prefix: str) -> None:
        """`prefix` stands before each file's path."""
        self._prefix = prefix
        self.by_path = {
            f"{prefix}/{file.relative_to(directory).as_posix()}": (
                _TYPES[file.suffix],
                file.read_bytes(),
            )
            for file in directory.rglob("*")
            if file.suffix in _TYPES
        }

    def holds(self, path: str) -> bool:
        """Whether `path` is a file by itself: pages have paths of their own."""
        return path in self.by_path and not path.endswith(".html")

    def page(self, name: str) -> bytes:
        return self.by_path[f"{self._prefix}/{name}.html"][1]

    async def send(self, exchange: HttpExchange, path: str) -> None:
        kind, content = self.by_path[path]
        await exchange.send_whole(200, content, kind)

    async def send_page(self, exchange: HttpExchange, name: str) -> None:
        await exchange.send_whole(200, self.page(name), HTML)


class BrowserSignIns:
    """Gives browsers their cookies and tells whose they are. Owner: the event loop.

    Invariants: a token is kept as a digest, the key that it stands for in memory only; a key is
    asked after at each use, so that one which was taken back opens nothing.
    """

    def __init__(self, port: int, keys: ClientKeys) -> None:
        self._keys = keys
        self._cookie = f"hearth-{port}"  # a browser tells no port from another
        # Kept for one key: sign-ins by digests, with their keys, 12 hours
        self._held: dict[bytes, tuple[bytes, float]] = {}  # the oldest first

    async def identity(self, exchange: HttpExchange) -> str | None:
        """Return what stands for the key of the request or of its cookie; None: none is needed.

        Raises:
            RequestError: 401, neither is accepted.
        """
        key = self.key_of(exchange)
        try:
            return await self._keys.identity(exchange.raw_headers)
        except RequestError:
            if key is None:
                raise
        return await self._keys.identity(key_header(key))

    async def needs_key(self) -> bool:
        """Return whether nothing is told without a key."""
        try:
            await self._keys.identity([])
        except RequestError:
            return True
        return False

    def key_of(self, exchange: HttpExchange) -> bytes | None:
        """Return the key that the cookie stands for; None where there is none that holds."""
        key, until = self._held.get(_digest(self._token(exchange)), (None, 0.0))
        return key if time.time() < until else None

    def _token(self, exchange: HttpExchange) -> str:
        # Other servers on this host set cookies too, of any form: no parser that stops at one.
        for pair in exchange.headers.get("cookie", "").split(";"):
            name, _, token = pair.strip().partition("=")
            if name == self._cookie:
                return token
        return ""

    async def sign_in(self, exchange: HttpExchange, key: bytes) -> None:
        """Accept `key`: the reply will give the cookies, if any key is needed.

        Raises:
            RequestError: 401, or why the key cannot be used now.
        """
        await self._keys.identity(key_header(key))
        if await self.needs_key():  # else each of any number of keys would have its sign-ins
            now, token = time.time(), secrets.token_urlsafe(32)
            self._held = {each: row for each, row in self._held.items() if now < row[1]}
            own = [each for each, (whose, _) in self._held.items() if whose == key]
            if len(own) >= SIGN_INS_MAX:
                del self._held[own[0]]
            self._held[_digest(token)] = (key, now + SIGN_IN_S)
            self._give_cookies(exchange, token, SIGN_IN_S)

    def sign_out(self, exchange: HttpExchange) -> None:
        """End the sign-in of the request's cookie. Raises: RequestError: 403, as `form_key`."""
        _check_own_page(exchange)
        self._held.pop(_digest(self._token(exchange)), None)
        self._give_cookies(exchange, "", 0)

    def _give_cookies(self, exchange: HttpExchange, token: str, age_s: float) -> None:
        for path in PATHS:
            cookie = (
                f"{self._cookie}={token}; Path={path}; Max-Age={age_s:.0f}; HttpOnly; "
                "SameSite=Strict"
            )
            exchange.reply_headers.append((b"set-cookie", cookie.encode()))


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


def key_header(key: bytes) -> RawHeaders:
    return [(b"x-api-key", key)]


def _check_own_page(exchange: HttpExchange) -> None:
    """Refuse what a listed site's page asks: it may use the API, and sign nobody in or out."""
    if exchange.listed_origin is not None:
        raise RequestError(
            f"Pages of {exchange.listed_origin!r:.120} sign nobody in here or out. Open this "
            "server's own page, or send a key with each request.",
            status=403,
            code="origin_refused",
        )


async def form_key(exchange: HttpExchange) -> bytes:
    """Return the field `key` of the posted form; nothing where it has none.

    Raises:
        RequestError: 403, another site's page sends it; 413, it is over FORM_BYTES_MAX.
    """
    _check_own_page(exchange)
    body = await exchange.read_body(FORM_BYTES_MAX)  # nobody has shown a key yet
    fields = parse_qs(body.decode("latin-1"), encoding="latin-1")
    return fields.get("key", [""])[0].encode("latin-1").strip()  # its letters may be any bytes
