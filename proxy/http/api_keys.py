"""Checks a client's API key."""

import hmac
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from typing import Final, Protocol

from hearth.shared.errors import RequestError

Headers = Iterable[tuple[bytes, bytes]]  # ASGI headers, names in lower case

SENT_MAX: Final = 4  # keys of one request that are checked


class ClientKeys(Protocol):
    """Identifies the client of a request by its API key. Owner: the event loop."""

    async def identity(self, headers: Headers, path: str = "") -> str | None:
        """Return a text that identifies the key in `headers`; None if all clients share one owner.

        All clients share one owner if no key is set, or a single key, which only admits.
        `path` is the request's path; "" = one of this server's own pages or reports.

        Raises:
            RequestError: 401, or the reason why the key cannot be checked.
        """


class ApiKeyCheck:
    """Compares a client's API keys with the accepted ones; if none is set, every request passes.

    It compares the digest of each sent key with all accepted digests, so that the time reveals
    neither a correct prefix, nor the length, nor which key matched.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def identity(self, headers: Headers, path: str = "") -> str | None:
        """Accept `Authorization: Bearer KEY` or `x-api-key: KEY`; see `ClientKeys`.

        If several keys were sent, the first accepted one counts. A key is good for every path.

        Raises:
            RequestError: 401, which does not say what was wrong with the key.
        """
        if not self._digests:
            return None
        sent = list(islice(sent_keys(headers), SENT_MAX))
        for key in sent:
            digest = sha256(key).digest()
            if any([hmac.compare_digest(digest, known) for known in self._digests]):
                return key.decode("latin-1") if len(self._digests) > 1 else None
        problem = "The API key is wrong" if sent else "An API key is required"
        raise RequestError(
            f"{problem}. Send the server's PROXY_API_KEY as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'.",
            status=401,
            code="invalid_api_key",
        )


def sent_keys(headers: Headers) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and token:
                yield token.strip()
