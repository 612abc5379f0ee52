"""The one check of a client's key."""

import hmac
from collections.abc import Iterable

from shared.errors import RequestError

Headers = Iterable[tuple[bytes, bytes]]  # as ASGI has them: lower-case names


class KeyCheck:
    """Compares what a client sent with the key that is required; none required, all pass."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, headers: Headers) -> None:
        """Accept `Authorization: Bearer KEY` or `x-api-key: KEY`.

        Raises:
            RequestError: 401, without a word about which part was wrong.
        """
        if not self._key:
            return
        sent = list(_sent_keys(headers))
        if any([hmac.compare_digest(candidate, self._key) for candidate in sent]):
            return
        problem = "The API key is wrong" if sent else "An API key is required"
        raise RequestError(
            f"{problem}. Send the server's PROXY_API_KEY as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'.",
            status=401,
            code="invalid_api_key",
        )


def _sent_keys(headers: Headers) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and token:
                yield token.strip()
