"""Serves the files of pages to browsers, and signs browsers in: a cookie stands for an API key.

A page can send no header with a form or an event stream, and must not keep a key where scripts can
read it. So the browser gets a cookie: a random token that stands for the key. The cookie is valid
only below the paths of this server's own pages, since a browser sends it to every port of the host.
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

PATHS: Final = ("/chat", "/dashboard")  # paths below which the cookie is sent
SIGN_IN_S: Final = 12 * 3600.0  # how long a sign-in is valid
SIGN_INS_MAX: Final = 64  # for one API key; one more ends the key's oldest sign-in
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
    """Return the headers of every reply to a page."""
    return [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-dns-prefetch-control", b"off"),  # the host of a link may hold words of a prompt
        (b"referrer-policy", b"same-origin"),  # no-referrer would make a form's Origin null
        (b"cache-control", b"no-store"),
    ]


class PageFiles:
    """The files of one directory, read once. Immutable."""

    def __init__(self, directory: Path, prefix: str) -> None:
        """`prefix` is put before each file's path."""
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
        """Return whether `path` is a file other than a page; pages have paths of their own."""
        return path in self.by_path and not path.endswith(".html")

    def page(self, name: str) -> bytes:
        return self.by_path[f"{self._prefix}/{name}.html"][1]

    async def send(self, exchange: HttpExchange, path: str) -> None:
        kind, content = self.by_path[path]
        await exchange.send_whole(200, content, kind)

    async def send_page(self, exchange: HttpExchange, name: str) -> None:
        await exchange.send_whole(200, self.page(name), HTML)


class BrowserSignIns:
    """Gives browsers cookies and finds the API key of a cookie. Owner: the event loop.

    Invariants: tokens are kept as digests, and keys in memory only; a key is checked at each use,
    so that a revoked key opens nothing.
    """

    def __init__(self, port: int, keys: ClientKeys) -> None:
        self._keys = keys
        self._cookie = f"hearth-{port}"  # a browser sends the cookies of all ports
        # Kept for one key: sign-ins by token digest, each with its API key and end, 12 hours
        self._sign_ins: dict[bytes, tuple[bytes, float]] = {}  # sign-ins, the oldest first

    async def identity(self, exchange: HttpExchange) -> str | None:
        """Return the identity of the request's API key, or of the cookie's key; see `ClientKeys`.

        Raises:
            RequestError: 401, neither key is accepted.
        """
        api_key = self.key_of(exchange)
        try:
            return await self._keys.identity(exchange.raw_headers)
        except RequestError:
            if api_key is None:
                raise
        return await self._keys.identity(key_header(api_key))

    async def needs_key(self) -> bool:
        """Return whether a request needs an API key."""
        try:
            await self._keys.identity([])
        except RequestError:
            return True
        return False

    def key_of(self, exchange: HttpExchange) -> bytes | None:
        """Return the API key of the cookie; None without a valid cookie."""
        api_key, until = self._sign_ins.get(_digest(self._token(exchange)), (None, 0.0))
        return api_key if time.time() < until else None

    def _token(self, exchange: HttpExchange) -> str:
        # Other servers on this host set cookies too, perhaps malformed ones: skip those.
        for pair in exchange.headers.get("cookie", "").split(";"):
            name, _, token = pair.strip().partition("=")
            if name == self._cookie:
                return token
        return ""

    async def sign_in(self, exchange: HttpExchange, api_key: bytes) -> None:
        """Accept `api_key`: the reply will set the cookies, if any key is needed.

        Raises:
            RequestError: 401, or the reason why the key cannot be used now.
        """
        await self._keys.identity(key_header(api_key))
        if await self.needs_key():  # otherwise any text would be a key, and sign-ins would pile up
            now, token = time.time(), secrets.token_urlsafe(32)
            self._sign_ins = {
                digest: sign_in for digest, sign_in in self._sign_ins.items() if now < sign_in[1]
            }
            own = [digest for digest, (owner, _) in self._sign_ins.items() if owner == api_key]
            if len(own) >= SIGN_INS_MAX:
                del self._sign_ins[own[0]]
            self._sign_ins[_digest(token)] = (api_key, now + SIGN_IN_S)
            self._give_cookies(exchange, token, SIGN_IN_S)

    def sign_out(self, exchange: HttpExchange) -> None:
        """End the sign-in of the request's cookie. Raises: RequestError: 403, like `form_key`."""
        _check_own_page(exchange)
        self._sign_ins.pop(_digest(self._token(exchange)), None)
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


def key_header(api_key: bytes) -> RawHeaders:
    return [(b"x-api-key", api_key)]


def _check_own_page(exchange: HttpExchange) -> None:
    """Refuse a page of an origin in CORS_ORIGINS: it may use the API, but not sign in or out."""
    if exchange.listed_origin is not None:
        raise RequestError(
            f"Pages of {exchange.listed_origin!r:.120} sign nobody in here or out. Open this "
            "server's own page, or send a key with each request.",
            status=403,
            code="origin_refused",
        )


async def form_key(exchange: HttpExchange) -> bytes:
    """Return the field `key` of the posted form; b"" if it is missing.

    Raises:
        RequestError: 403, another site's page sent the form; 413, it is over FORM_BYTES_MAX.
    """
    _check_own_page(exchange)
    body = await exchange.read_body(FORM_BYTES_MAX)  # small, since no key is checked yet
    fields = parse_qs(body.decode("latin-1"), encoding="latin-1")
    return fields.get("key", [""])[0].encode("latin-1").strip()  # a key may hold any bytes
