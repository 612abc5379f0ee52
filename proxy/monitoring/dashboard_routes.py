"""Serves `/dashboard`: the page, its files, the sign-in and the events."""

import logging
from pathlib import Path
from typing import Final

from hearth.proxy.http.browser_pages import HTML, BrowserSignIns, PageFiles, form_key, page_headers
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange, wrong_method
from hearth.proxy.monitoring.dashboard_feed import DashboardFeed
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

PATH: Final = "/dashboard"
SEND_WAIT_S_MAX: Final = 20.0  # for a page to take an event; then its stream ends
_WRONG: Final = b"<!--wrong-->"  # in the sign-in page, where it says that a key was refused
_WRONG_TEXT: Final = b'<p id="wrong" role="alert">This key is not accepted.</p>'


class Dashboard:
    """Serves all under PATH, and checks keys and sign-ins by itself. Owner: the event loop."""

    def __init__(self, feed: DashboardFeed, sign_ins: BrowserSignIns) -> None:
        self._feed = feed
        self._sign_ins = sign_ins
        self.files = PageFiles(Path(__file__).parent / "pages", PATH)

    @staticmethod
    def serves(exchange: HttpExchange) -> bool:
        """Whether the request is for something under PATH."""
        return exchange.path == PATH or exchange.path.startswith(PATH + "/")

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer a request under PATH, whose Host and Origin were checked.

        Raises:
            RequestError: 401 without a key, 404, 405, 413, or a 503 where too many listen.
        """
        exchange.reply_headers += page_headers()
        path = exchange.path.rstrip("/")
        if path == f"{PATH}/login":
            await self._log_in(exchange)
            return
        if exchange.method not in ("GET", "HEAD"):
            raise wrong_method(exchange, "GET, HEAD")
        if path == PATH:
            is_known = await self._key_of(exchange) is not None
            await self.files.send_page(exchange, "index" if is_known else "login")
        elif path == f"{PATH}/events":
            await self._events(exchange)
        elif self.files.holds(path):
            await self.files.send(exchange, path)
        else:
            text = f"{exchange.path!r:.120} is not served here."
            raise RequestError(text, status=404, code="not_found")

    async def _key_of(self, exchange: HttpExchange) -> str | None:
        """Return the digest of the key that the request comes with; None where it needs one."""
        try:
            key = await self._sign_ins.identity(exchange)
        except RequestError:
            return None
        return key_digest({"x-api-key": key}) if key else ""

    async def _log_in(self, exchange: HttpExchange) -> None:
        """Give a cookie for a key, and go on to the page."""
        if exchange.method != "POST":
            raise wrong_method(exchange, "POST")
        key = await form_key(exchange)
        try:
            await self._sign_ins.sign_in(exchange, key)
        except RequestError:
            page = self.files.page("login").replace(_WRONG, _WRONG_TEXT)
            await exchange.send_whole(401, page, HTML)
            return
        exchange.reply_headers.append((b"location", PATH.encode()))
        await exchange.send_whole(303, b"", HTML)

    async def _events(self, exchange: HttpExchange) -> None:
        """Send what happens until the page goes away, or does not read."""
        if exchange.method != "GET":
            raise wrong_method(exchange, "GET")
        key = await self._key_of(exchange)
        if key is None:
            text = f"Sign in at {PATH}, or send a key as the API takes it."
            raise RequestError(text, status=401, code="invalid_api_key")
        exchange.keep_place()
        with self._feed.listening(key) as events:
            sending = exchange.send_events(events, SEND_WAIT_S_MAX)
            try:
                await exchange.while_connected(sending)
            except ClientGone:
                pass  # as every page does in the end: nobody has left an answer
            except TimeoutError:
                log.info("a dashboard has read nothing for %g s: ended", SEND_WAIT_S_MAX)
