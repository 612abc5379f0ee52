"""Serves `/dashboard`, the page, its files, the sign-in and the events, and the start page.

A page can send no header with its event stream, so it carries a cookie: a random token that stands
for a key which was checked once. The cookie is good for /dashboard only, never for the API.
"""

import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from hearth.proxy.http.api_keys import ApiKeyCheck, ClientKeys
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange, wrong_method
from hearth.proxy.monitoring.dashboard_feed import DashboardFeed
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import Settings

log = logging.getLogger(__name__)

PATH: Final = "/dashboard"
SIGN_IN_S: Final = 12 * 3600.0  # a sign-in is good for so long
SIGN_INS_MAX: Final = 64  # of a key; of one more its oldest ends, and nobody else's
FORM_BYTES_MAX: Final = 4096
SEND_WAIT_S_MAX: Final = 20.0  # for a page to take an event; then its stream ends
_PAGES: Final = Path(__file__).parent / "pages"
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_HEADERS: Final = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # not no-referrer: a form's Origin would be null
    (b"cache-control", b"no-store"),
]
_WRONG: Final = b"<!--wrong-->"  # in the sign-in page, where it says that a key was refused
_WRONG_TEXT: Final = b'<p id="wrong" role="alert">This key is not accepted.</p>'


class SignIns:
    """The sign-ins that hold, at most SIGN_INS_MAX of each key. Owner: the event loop.

    Invariant: a token is kept as a digest, in memory only.
    """

    def __init__(self) -> None:
        self._sign_ins: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def issue(self, key: str) -> str:
        """Return a new token that stands for `key`, a digest."""
        token = secrets.token_urlsafe(32)
        self._sign_ins[_digest(token)] = (key, time.time() + SIGN_IN_S)
        own = [digest for digest, (whose, _) in self._sign_ins.items() if whose == key]
        if len(own) > SIGN_INS_MAX:
            del self._sign_ins[own[0]]
        return token

    def key_of(self, token: str) -> str | None:
        """Return the digest of the key that `token` stands for; None of one that does not hold."""
        key, until = self._sign_ins.get(_digest(token), ("", 0.0))
        return key if time.time() < until else None


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


class Dashboard:
    """Serves all under PATH, and checks keys and sign-ins by itself. Owner: the event loop."""

    def __init__(
        self, settings: Settings, feed: DashboardFeed, keys: ClientKeys | None = None
    ) -> None:
        """`keys` are checked in place of the settings' own."""
        self._keys: ClientKeys = keys or ApiKeyCheck(settings.api_keys)
        self._feed = feed
        self._sign_ins = SignIns()
        self._cookie = f"hearth-{settings.proxy_port}"  # a browser tells no port from another
        self.files = {
            f"{PATH}/{file.relative_to(_PAGES).as_posix()}": (
                _TYPES[file.suffix],
                file.read_bytes(),
            )
            for file in _PAGES.rglob("*")
            if file.suffix in _TYPES
        }

    @staticmethod
    def serves(exchange: HttpExchange) -> bool:
        """Whether the request is for something under PATH, or for the start page by a browser."""
        path = exchange.path
        return path == PATH or path.startswith(PATH + "/") or _is_start(exchange)

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer a request under PATH, whose Host and Origin were checked.

        Raises:
            RequestError: 401 without a key, 404, 405, 413, or a 503 where too many listen.
        """
        exchange.reply_headers += _HEADERS
        path = exchange.path.rstrip("/")
        if _is_start(exchange):
            await self._file(exchange, f"{PATH}/start.html")
            return
        if path == f"{PATH}/login":
            await self._log_in(exchange)
            return
        if exchange.method not in ("GET", "HEAD"):
            raise wrong_method(exchange, "GET, HEAD")
        if path == PATH:
            is_known = await self._key_of(exchange) is not None
            await self._file(exchange, f"{PATH}/{'index' if is_known else 'login'}.html")
        elif path == f"{PATH}/events":
            await self._events(exchange)
        elif path in self.files and not path.endswith(".html"):
            await self._file(exchange, path)
        else:
            text = f"{exchange.path!r:.120} is not served here."
            raise RequestError(text, status=404, code="not_found")

    async def _key_of(self, exchange: HttpExchange) -> str | None:
        """Return the digest of the key that the request comes with; None where it needs one."""
        with contextlib.suppress(RequestError):
            return _digest_of(await self._keys.identity(exchange.raw_headers))
        # Other servers on this host set cookies too, of any form: no parser that stops at one.
        for pair in exchange.headers.get("cookie", "").split(";"):
            name, _, token = pair.strip().partition("=")
            if name == self._cookie:
                return self._sign_ins.key_of(token)
        return None

    async def _file(self, exchange: HttpExchange, path: str) -> None:
        kind, content = self.files[path]
        await exchange.send_whole(200, content, kind)

    async def _log_in(self, exchange: HttpExchange) -> None:
        """Give a cookie for a key, and go on to the page."""
        if exchange.method != "POST":
            raise wrong_method(exchange, "POST")
        _check_size(exchange)
        key = _form_key(await exchange.read_body())
        try:
            identity = await self._keys.identity([(b"x-api-key", key)])
        except RequestError:
            kind, page = self.files[f"{PATH}/login.html"]
            await exchange.send_whole(401, page.replace(_WRONG, _WRONG_TEXT), kind)
            return
        token = self._sign_ins.issue(_digest_of(identity))
        cookie = (
            f"{self._cookie}={token}; Path={PATH}; Max-Age={SIGN_IN_S:.0f}; "
            "HttpOnly; SameSite=Strict"
        )
        exchange.reply_headers += [
            (b"location", PATH.encode()),
            (b"set-cookie", cookie.encode()),
        ]
        await exchange.send_whole(303, b"", _TYPES[".html"])

    async def _events(self, exchange: HttpExchange) -> None:
        """Send what happens until the page goes away, or does not read."""
        if exchange.method != "GET":
            raise wrong_method(exchange, "GET")
        key = await self._key_of(exchange)
        if key is None:
            text = f"Sign in at {PATH}, or send a key as the API takes it."
            raise RequestError(text, status=401, code="invalid_api_key")
        exchange.keep_place()
        with self._feed.listening(self._feed.requests.whose(key)) as events:
            sending = exchange.send_events(events, SEND_WAIT_S_MAX)
            try:
                await exchange.while_connected(sending)
            except ClientGone:
                pass  # as every page does in the end: nobody has left an answer
            except TimeoutError:
                self._feed.dropped += 1
                log.info("a dashboard has read nothing for %g s: ended", SEND_WAIT_S_MAX)


def _is_start(exchange: HttpExchange) -> bool:
    """Whether a person looks at the server's address: programs ask for no page."""
    wants_page = "text/html" in exchange.headers.get("accept", "")
    return exchange.path == "/" and exchange.method in ("GET", "HEAD") and wants_page


def _digest_of(key: str | None) -> str:
    return key_digest({"x-api-key": key}) if key else ""


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


def _form_key(body: bytes) -> bytes:
    """Return the field `key` of a posted form; nothing where it has none."""
    fields = parse_qs(body.decode("latin-1"), encoding="latin-1")
    return fields.get("key", [""])[0].encode("latin-1").strip()  # its letters may be any bytes
