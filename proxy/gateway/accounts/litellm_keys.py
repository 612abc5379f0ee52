"""Has LiteLLM check the keys of clients, where its config says that keys are its own.

It does so for local requests and for our own routes too; `litellm_auth` is what runs there.
"""

from typing import Any, Final

from hearth.proxy.api import prefill_endpoint
from hearth.proxy.api.dialects import ANSWER_PATHS
from hearth.proxy.gateway.litellm_messages import KEY_HEADERS, AccountDialect
from hearth.proxy.gateway.litellm_process import LiteLLMLine, LiteLLMProcess
from hearth.proxy.http.api_keys import Headers
from hearth.proxy.http.http_exchange import HttpExchange
from hearth.shared.errors import RequestError

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
    **dict.fromkeys(ANSWER_PATHS, _CHAT),
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


class LiteLLMKeys:
    """Asks LiteLLM whose a key is and what it may. Owner: our event loop."""

    def __init__(self, litellm: LiteLLMProcess, own_header: str = "") -> None:
        """`own_header` is the config's litellm_key_header_name."""
        self.headers = (*KEY_HEADERS, own_header.lower().encode()) if own_header else KEY_HEADERS
        self._litellm = litellm

    async def identity(
        self, headers: Headers, path: str = "", method: str = "POST", group: str = ""
    ) -> str:
        """See `ClientKeys`; with a `group` the key may also ask for that. Nothing is reserved.

        `key_digest` of it names the owner of the cache, of turns and of stored responses. Where no
        key was sent LiteLLM is not asked.
        """
        rows = list(headers)
        if not any(value.strip() for name, value in rows if name in self.headers):
            text = "An API key is required. Send one of LiteLLM's as 'Authorization: Bearer KEY'."
            raise RequestError(text, status=401, code="invalid_api_key")
        asked = _caller(method, path, rows) | {"group": group}
        owner: str = await self._litellm.ask("owner", asked)
        return owner

    async def begin(
        self, exchange: HttpExchange, path: str, group: str, dialect: AccountDialect
    ) -> LiteLLMLine:
        """Return the line on which a local answer for `group` is booked; its log is told on it.

        Closed before, it gives back what the key has reserved.

        Raises:
            RequestError: the key may not, or what its models, budget and limits say.
        """
        asked = {"group": group, "dialect": dialect, "request_id": exchange.request_id}
        line = await self._litellm.line()
        try:
            caller = _caller(exchange.method, path, exchange.raw_headers)
            await line.ask("begin", caller | asked)
        except BaseException:
            line.close()
            raise
        return line


def _caller(method: str, path: str, headers: Headers) -> dict[str, Any]:
    """Return what of a request LiteLLM looks at to know whose it is; no text of the request."""
    rows = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    return {"method": method, "path": route_of(path), "headers": rows}
