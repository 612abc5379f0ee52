"""Serves the chat page at `/`, its files and its sign-in, and accepts its API calls.

The page sends its API calls to paths below API. If API keys are set, these calls carry the
cookie of the sign-in. Such a call becomes an ordinary API request with the key of the cookie.
"""

import contextlib
from pathlib import Path
from typing import Final

from hearth.proxy.http.browser_pages import (
    POLICY,
    BrowserSignIns,
    PageFiles,
    form_key,
    key_header,
    page_headers,
)
from hearth.proxy.http.http_exchange import HttpExchange, wrong_method
from hearth.proxy.request.session_id import PAGE_HEADER
from hearth.shared.errors import RequestError

FILES: Final = "/chat"
SIGN_IN: Final = "/chat/sign-in"
API: Final = "/chat/api"
# The page shows only images that the user attached, from its own memory. Only the sanitiser may
# turn text into HTML elements.
CHAT_POLICY: Final = (
    f"{POLICY}; img-src 'self' blob: data:; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_CALLS: Final = {  # the API paths that the page needs, each with its only method
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/health": "GET",
}
_API_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class ChatPage:
    """Serves the chat page and accepts its API calls. Owner: the event loop."""

    def __init__(self, sign_ins: BrowserSignIns) -> None:
        self._sign_ins = sign_ins
        self.files = PageFiles(Path(__file__).parent / "pages", FILES)

    def serves(self, exchange: HttpExchange) -> bool:
        """Return whether a browser asks for the page, or any client for its files or sign-in."""
        if exchange.path == "/":  # only browsers get the page, not programs
            wants_page = "text/html" in exchange.headers.get("accept", "")
            return wants_page and exchange.method in ("GET", "HEAD")
        return exchange.path == SIGN_IN or self.files.holds(exchange.path)

    @staticmethod
    def calls(exchange: HttpExchange) -> bool:
        """Return whether the request is one of the page's API calls."""
        return exchange.path.startswith(API + "/")

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer a request that `serves` accepts; it needs no key. Host and Origin were checked.

        Raises:
            RequestError: 401, a wrong key; 403, 405, 413.
        """
        exchange.reply_headers += page_headers(CHAT_POLICY)
        if exchange.path == SIGN_IN:
            await self._sign_in(exchange)
        elif exchange.method not in ("GET", "HEAD"):
            raise wrong_method(exchange, "GET, HEAD")
        elif exchange.path == "/":
            await self.files.send_page(exchange, "index")
        else:
            await self.files.send(exchange, exchange.path)

    async def _sign_in(self, exchange: HttpExchange) -> None:
        """Report whether the browser is signed in, sign it in with a key, or sign it out."""
        is_in, needs_key = exchange.method == "POST", True
        if exchange.method == "POST":
            await self._sign_ins.sign_in(exchange, await form_key(exchange))
        elif exchange.method == "DELETE":
            self._sign_ins.sign_out(exchange)
        elif exchange.method in ("GET", "HEAD"):
            needs_key = await self._sign_ins.needs_key()
            if needs_key and _may_act_by_cookie(exchange):
                with contextlib.suppress(RequestError):
                    await self._sign_ins.identity(exchange)
                    is_in = True
        else:
            raise wrong_method(exchange, "GET, HEAD, POST, DELETE")
        await exchange.send_json(200, {"needs_key": needs_key, "is_signed_in": is_in})

    def take_call(self, exchange: HttpExchange) -> None:
        """Turn the page's call into an ordinary API request with the key of its cookie.

        Raises:
            RequestError: 404 or 405, the page makes no such call.
        """
        path = exchange.path.removeprefix(API)
        allowed = _CALLS.get(path)
        if allowed is None:
            raise RequestError(
                f"{exchange.path!r:.120} is not served here.", status=404, code="not_found"
            )
        if exchange.method != allowed:
            raise wrong_method(exchange, allowed)
        exchange.path = path
        exchange.reply_headers += _API_HEADERS
        has_own = "x-api-key" in exchange.headers or "authorization" in exchange.headers
        acts_by_cookie = not has_own and _may_act_by_cookie(exchange)
        api_key = self._sign_ins.key_of(exchange) if acts_by_cookie else None
        if api_key is not None:
            exchange.raw_headers = [
                *(header for header in exchange.raw_headers if header[0] != b"cookie"),
                *key_header(api_key),
            ]


def _may_act_by_cookie(exchange: HttpExchange) -> bool:
    """Return whether the request comes from this server's own page, judged by a browser's headers.

    A browser sends the cookie for pages of other ports too. It adds Origin to a request that
    changes something, and Sec-Fetch-Site to one that only reads, but not for http addresses beyond
    this machine. For such addresses PAGE_HEADER decides, which no page of another origin can send
    without a CORS preflight.
    """
    if exchange.listed_origin is not None:
        return False
    if "origin" in exchange.headers:
        return True  # this server's own page: OriginRules refuses all other origins
    if exchange.method not in ("GET", "HEAD"):
        return False
    site = exchange.headers.get("sec-fetch-site")
    return PAGE_HEADER in exchange.headers if site is None else site in ("same-origin", "none")
