"""Checks a client's API key."""

import hmac
from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import islice
from typing import Final, Protocol

from hearth.shared.errors import RequestError

Headers = Iterable[tuple[bytes, bytes]]  # as ASGI has them: lower-case names

SENT_MAX: Final = 4  # keys that are looked at in one request


class ClientKeys(Protocol):
    """Says whose a request is. Owner: the event loop."""

    async def identity(self, headers: Headers, path: str = "") -> str | None:
        """Return what stands for the key that `headers` hold; None where all are everybody's.

        So they are where no key is set, and where one is: it is who may come in.
        `path` is what it asks for; "" = a page or a figure of this server's.

        Raises:
            RequestError: 401, or why it cannot be said.
        """


class ApiKeyCheck:
    """Compares what a client sent with the keys that are accepted; where there are none, all pass.

    Digests are compared, each with every other: how long it takes tells neither how much of a key
    was right, nor its length, nor which one it was.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def identity(self, headers: Headers, path: str = "") -> str | None:
        """Accept `Authorization: Bearer KEY` or `x-api-key: KEY`; see `ClientKeys`.

        Of several that were sent the first accepted one counts. It is good for every path.

        Raises:
            RequestError: 401, without a word about which part was wrong.
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
