"""Serves the files of a page: HTML, styles, scripts, each with what a browser may do with it."""

from pathlib import Path
from typing import Final

from hearth.proxy.http.http_exchange import HttpExchange, RawHeaders

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
