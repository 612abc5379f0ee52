"""Signs browsers in with a key, and knows them by a cookie from then on.

A page can send no header with a form or an event stream, and must not keep a key where scripts read
it. So it carries a cookie: a random token that stands for a key. The cookie is good below the
paths of this server's own pages only: a browser gives it to every server on this host.
"""

import secrets
import time
from collections import OrderedDict
from hashlib import sha256
from itertools import takewhile
from typing import Final
from urllib.parse import parse_qs

from hearth.proxy.http.api_keys import ClientKeys
from hearth.proxy.http.http_exchange import HttpExchange, RawHeaders
from hearth.shared.errors import RequestError

PATHS: Final = ("/chat", "/dashboard")  # below which the cookie is sent
SIGN_IN_S: Final = 12 * 3600.0  # a sign-in is good for so long
SIGN_INS_MAX: Final = 64  # of a key; of one more its oldest ends, and nobody else's
FORM_BYTES_MAX: Final = 4096


class SignIns:
    """The sign-ins that hold, at most SIGN_INS_MAX of each key. Owner: the event loop.

    Invariant: a token is kept as a digest; the key that it stands for is in memory only.
    """

    def __init__(self) -> None:
        # Kept for one key: sign-ins by digests, with their keys, 12 hours
        self._sign_ins: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def issue(self, key: bytes) -> str:
        """Return a new token that stands for `key`."""
        self._drop_ended()
        token = secrets.token_urlsafe(32)
        self._sign_ins[_digest(token)] = (key, time.time() + SIGN_IN_S)
        own = [digest for digest, (whose, _) in self._sign_ins.items() if whose == key]
        if len(own) > SIGN_INS_MAX:
            del self._sign_ins[own[0]]
        return token

    def _drop_ended(self) -> None:
        """Forget the keys whose sign-ins have ended: each is good for the same time."""
        now = time.time()
        ended = takewhile(lambda row: row[1][1] <= now, self._sign_ins.items())
        for digest in [digest for digest, _ in ended]:
            del self._sign_ins[digest]

    def key_of(self, token: str) -> bytes | None:
        """Return the key that `token` stands for; None of one that does not hold."""
        key, until = self._sign_ins.get(_digest(token), (b"", 0.0))
        return key if time.time() < until else None

    def end(self, token: str) -> None:
        self._sign_ins.pop(_digest(token), None)


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


class BrowserSignIns:
    """Gives browsers their cookies and tells whose they are. Owner: the event loop.

    Invariant: a key is asked after at each use, so that one which was taken back opens nothing.
    """

    def __init__(self, port: int, keys: ClientKeys) -> None:
        self._keys = keys
        self._sign_ins = SignIns()
        self._cookie = f"hearth-{port}"  # a browser tells no port from another

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
        token = self._token(exchange)
        return None if token is None else self._sign_ins.key_of(token)

    def _token(self, exchange: HttpExchange) -> str | None:
        # Other servers on this host set cookies too, of any form: no parser that stops at one.
        for pair in exchange.headers.get("cookie", "").split(";"):
            name, _, token = pair.strip().partition("=")
            if name == self._cookie:
                return token
        return None

    async def sign_in(self, exchange: HttpExchange, key: bytes) -> None:
        """Accept `key`: the reply will give the cookies, if any key is needed.

        Raises:
            RequestError: 401, or why the key cannot be used now.
        """
        await self._keys.identity(key_header(key))
        if await self.needs_key():  # else each of any number of keys would have its sign-ins
            self._give_cookies(exchange, self._sign_ins.issue(key), SIGN_IN_S)

    def sign_out(self, exchange: HttpExchange) -> None:
        """End the sign-in of the request's cookie. Raises: RequestError: 403, as `form_key`."""
        _check_own_page(exchange)
        token = self._token(exchange)
        if token is not None:
            self._sign_ins.end(token)
        self._give_cookies(exchange, "", 0)

    def _give_cookies(self, exchange: HttpExchange, token: str, age_s: float) -> None:
        for path in PATHS:
            cookie = (
                f"{self._cookie}={token}; Path={path}; Max-Age={age_s:.0f}; HttpOnly; "
                "SameSite=Strict"
            )
            exchange.reply_headers.append((b"set-cookie", cookie.encode()))


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


def _check_size(exchange: HttpExchange) -> None:
    """Refuse what is no sign-in by its length alone: nobody has shown a key yet.

    Raises:
        RequestError: 413, it is too long or does not say how long it is.
    """
    length = exchange.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) <= 9 and int(length) <= FORM_BYTES_MAX:
        return
    raise RequestError(
        f"The form's Content-Length is {length or 'missing'!r:.20} and this server accepts "
        f"{FORM_BYTES_MAX:,}. Send the key only.",
        status=413,
        code="body_too_large",
    )


async def form_key(exchange: HttpExchange) -> bytes:
    """Return the field `key` of the posted form; nothing where it has none.

    Raises:
        RequestError: 403, another site's page sends it; 413, the request is no such form.
    """
    _check_own_page(exchange)
    _check_size(exchange)
    body = await exchange.read_body()
    fields = parse_qs(body.decode("latin-1"), encoding="latin-1")
    return fields.get("key", [""])[0].encode("latin-1").strip()  # its letters may be any bytes
