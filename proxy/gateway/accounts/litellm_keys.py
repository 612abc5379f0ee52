"""Has LiteLLM check the keys of clients, where its config says that keys are its own.

The check runs on LiteLLM's event loop, for local requests and for our own routes too. Nothing of
LiteLLM is imported here: `litellm_auth` has the part that runs there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from hearth.proxy.api import prefill_endpoint
from hearth.proxy.gateway.accounts.litellm_usage import AccountDialect, KeyedCall
from hearth.proxy.gateway.litellm_thread import LiteLLMThread
from hearth.proxy.http.api_keys import Headers
from hearth.proxy.http.http_exchange import RawHeaders
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError

T = TypeVar("T")

# Headers that a key may come in, of which LiteLLM takes the first in its own order.
KEY_HEADERS: Final = (b"x-litellm-api-key", b"authorization", b"api-key", b"x-api-key")
READY_WAIT_S_MAX: Final = 30.0  # for LiteLLM to be imported, before a client is told to come back
CHECK_S_MAX: Final = 10.0  # for LiteLLM, and its database, to say whose a key is


# What LiteLLM knows as routes for keys, itself or by how it begins; a key may have a list of them.
_ROUTES: Final = (
    *("/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"),
    *("/v1/messages", "/v1/responses", "/responses", "/v1/embeddings", "/embeddings"),
    *("/v1/rerank", "/v2/rerank", "/rerank"),
)
_MODELS: Final = ("/v1/models", "/models")  # LiteLLM has those below for keys of users alone


_CHAT, _EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_LIKE: Final = {  # of ours, those that read or answer a text, as those of LiteLLM's do
    prefill_endpoint.PATH: _CHAT,
    **dict.fromkeys(("/api/chat", "/api/generate"), _CHAT),
    **dict.fromkeys(("/api/embed", "/api/embeddings"), _EMBEDDINGS),
}


def route_of(path: str) -> str:
    """Return the route that a key is checked for at `path`.

    Our own routes are none of LiteLLM's: who may list models may ask what is kept for their key,
    and a prompt is read for whoever may have it answered.
    """
    if path in _MODELS or any(path == route or path.startswith(f"{route}/") for route in _ROUTES):
        return path
    return _LIKE.get(path, _MODELS[0])


@dataclass(frozen=True, slots=True)
class KeyCaller:
    """What of a request LiteLLM looks at to know whose it is; no text of the request."""

    method: str
    path: str
    headers: RawHeaders
    client: str = "127.0.0.1"  # its address
    tokens_max: int | None = None  # of its answers together; LiteLLM reserves their price


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Whose a request is, by LiteLLM's word.

    `identity` is what stands for the key from here on: `key_digest` of it names the owner of the
    cache, of turns and of stored responses. It is the key itself where LiteLLM knows it by a
    digest of it.
    """

    identity: str
    auth: Any = None  # LiteLLM's UserAPIKeyAuth

    @property
    def digest(self) -> str:
        return key_digest({"x-api-key": self.identity})


class KeyChecks(Protocol):
    """What runs on LiteLLM's loop; both raise RequestError where the key may not."""

    def owner(self, caller: KeyCaller, group: str) -> Coroutine[Any, Any, KeyOwner]: ...

    def begin(
        self, caller: KeyCaller, group: str, dialect: AccountDialect, request_id: str
    ) -> Coroutine[Any, Any, tuple[KeyOwner, KeyedCall]]: ...


class LiteLLMKeys:
    """Asks LiteLLM whose a key is and what it may. Owner: our event loop.

    Invariant: what `begin` returned ends in one LocalAnswerLog, which gives back what it reserved.
    """

    def __init__(
        self,
        loop: LiteLLMThread,
        ready: Callable[[], Awaitable[None]],
        checks: KeyChecks,
        own_header: str = "",
    ) -> None:
        """`ready` returns once LiteLLM serves, and raises where it never will.

        `own_header` is the config's litellm_key_header_name.
        """
        self.headers = (*KEY_HEADERS, own_header.lower().encode()) if own_header else KEY_HEADERS
        self._loop = loop
        self._ready = ready
        self._checks = checks

    async def identity(self, headers: Headers, path: str = "") -> str:
        """See `ClientKeys`. Where no key was sent LiteLLM is not asked."""
        rows = list(headers)
        if not any(name in self.headers for name, _ in rows):
            text = "An API key is required. Send one of LiteLLM's as 'Authorization: Bearer KEY'."
            raise RequestError(text, status=401, code="invalid_api_key")
        return (await self.owner(KeyCaller("POST", path, rows))).identity

    async def owner(self, caller: KeyCaller, group: str = "") -> KeyOwner:
        """Return whose the request is; with a `group` also whether its key may ask for that.

        Raises:
            RequestError: 401, 403 or 429 of LiteLLM's, or a 503 while it is not there yet.
        """
        return await self._ask(lambda: self._checks.owner(caller, group))

    async def begin(
        self, caller: KeyCaller, group: str, dialect: AccountDialect, request_id: str
    ) -> tuple[KeyOwner, KeyedCall]:
        """Return what a local answer for `group` is booked on: the key may ask for it now.

        Raises:
            RequestError: as `owner`, or what the key's models, budget and limits say.
        """
        return await self._ask(lambda: self._checks.begin(caller, group, dialect, request_id))

    async def _ask(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._wait_ready()
        try:
            async with asyncio.timeout(CHECK_S_MAX):
                return await self._loop.run(work)
        except TimeoutError:
            text = (
                f"LiteLLM has not said within {CHECK_S_MAX:g} s whose this key is. See to its "
                "database, or send the request again."
            )
            raise RequestError(text, status=503, code="key_check_failed") from None

    async def _wait_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_WAIT_S_MAX):
                await self._ready()
        except TimeoutError:
            text = (
                f"Keys are checked by LiteLLM, which is not ready after {READY_WAIT_S_MAX:g} s. "
                "Send the request again."
            )
            raise RequestError(text, status=503, code="starting", retry_after_s=5) from None
