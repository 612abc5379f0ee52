"""Serves the page to talk at `/`, its files and its sign-in, and takes its calls of the API.

The page calls the API below API, by the cookie of its sign-in where keys are set. Such a call is
then the API's own request, with the key that the cookie stands for.
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
# Pictures are those that a user shows, out of the page's own memory: none is ever loaded. Markup
# passes the sanitiser, which alone may make elements of text.
CHAT_POLICY: Final = (
    f"{POLICY}; img-src 'self' blob: data:; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_CALLS: Final = {  # what the page needs of the API: its path and the only method
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/health": "GET",
}
_API_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class ChatPage:
    """Serves the page, and lets in its calls. Owner: the event loop."""

    def __init__(self, sign_ins: BrowserSignIns) -> None:
        self._sign_ins = sign_ins
        self.files = PageFiles(Path(__file__).parent / "pages", FILES)

    def serves(self, exchange: HttpExchange) -> bool:
        """Whether the request is for the page by a browser, for a file of it or its sign-in."""
        if exchange.path == "/":  # a person looks at the server's address: programs want no page
            wants_page = "text/html" in exchange.headers.get("accept", "")
            return wants_page and exchange.method in ("GET", "HEAD")
        return exchange.path == SIGN_IN or self.files.holds(exchange.path)

    @staticmethod
    def calls(exchange: HttpExchange) -> bool:
        """Whether the request is a call of the API that the page makes."""
        return exchange.path.startswith(API + "/")

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer what `serves` says, whose Host and Origin were checked; none of it needs a key.

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
        """Tell whether the browser is signed in, sign it in with a key, or out."""
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
        """Make a call of the page's the API's own request, by the key that its cookie stands for.

        Raises:
            RequestError: 404 or 405, the page needs no such call.
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
        key = self._sign_ins.key_of(exchange) if acts_by_cookie else None
        if key is not None:
            exchange.raw_headers = [
                *(row for row in exchange.raw_headers if row[0] != b"cookie"),
                *key_header(key),
            ]


def _may_act_by_cookie(exchange: HttpExchange) -> bool:
    """Return whether this server's own page asks, as far as only a browser can have said so.

    A browser sends the cookie for pages of other ports too. It says Origin with all that changes
    something; of what only reads it says Sec-Fetch-Site, but to http addresses beyond this
    machine neither. There PAGE_HEADER tells: no other origin's page may send it unasked.
    """
    if exchange.listed_origin is not None:
        return False
    if "origin" in exchange.headers:
        return True  # this server's own: OriginRules refuses all others
    if exchange.method not in ("GET", "HEAD"):
        return False
    site = exchange.headers.get("sec-fetch-site")
    return PAGE_HEADER in exchange.headers if site is None else site in ("same-origin", "none")
