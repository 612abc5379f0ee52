"""Has no HTTP client of LiteLLM follow a redirect: only addresses that a config names are reached.

A redirect would take the prompt, and Anthropic's key, to a host in no config. LiteLLM makes most
of its clients with `follow_redirects=True`, which no setting of it turns off, so what all of them
send through is wrapped: `send` of httpx, and `post` of aiohttp for `aiohttp_openai/`. Where LiteLLM
asks for no redirects it looks at each address itself, as for an image that it fetches.
"""

from typing import Any, Final

import aiohttp
import httpx

STATUS: Final = 502


def refuse_redirects() -> None:
    """Wrap the clients of this process; to do so twice changes nothing more."""
    send, send_async, post = httpx.Client.send, httpx.AsyncClient.send, aiohttp.ClientSession.post

    def sync_send(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        answer = send(self, request, **options | {"follow_redirects": False})
        if not _is_refused(self, options, answer):
            return answer
        answer.close()
        return _refusal(answer)

    async def async_send(
        self: httpx.AsyncClient, request: httpx.Request, **options: Any
    ) -> httpx.Response:
        answer = await send_async(self, request, **options | {"follow_redirects": False})
        if not _is_refused(self, options, answer):
            return answer
        await answer.aclose()
        return _refusal(answer)

    def aiohttp_post(self: aiohttp.ClientSession, url: Any, **options: Any) -> Any:
        ours = {"allow_redirects": False, "raise_for_status": _refuse_aiohttp}
        return post(self, url, **options | ours)

    httpx.Client.send = sync_send  # type: ignore[method-assign]
    httpx.AsyncClient.send = async_send  # type: ignore[method-assign]
    aiohttp.ClientSession.post = aiohttp_post  # type: ignore[method-assign]


def _is_refused(client: Any, options: dict[str, Any], answer: httpx.Response) -> bool:
    """Return whether `answer` is a redirect that the caller would have had followed."""
    asked = options.get("follow_redirects", httpx.USE_CLIENT_DEFAULT)
    follows = client.follow_redirects if asked is httpx.USE_CLIENT_DEFAULT else asked
    return bool(follows and answer.has_redirect_location)


def _refusal(answer: httpx.Response) -> httpx.Response:
    """Return the error that stands for a redirect, as providers write theirs."""
    error = {"message": _text(answer.status_code), "type": "api_error"}
    return httpx.Response(STATUS, json={"error": error}, request=answer.request)


async def _refuse_aiohttp(answer: aiohttp.ClientResponse) -> None:
    if "location" in answer.headers and 300 <= answer.status < 400:
        answer.release()
        text = _text(answer.status)
        raise aiohttp.ClientResponseError(
            answer.request_info, answer.history, status=STATUS, message=text
        )


def _text(status: int) -> str:
    return (
        f"The model's server answers with a redirect ({status}), which is not followed: prompts "
        "and keys go only to addresses that LITELLM_CONFIG names. Set api_base to the address that "
        "serves this model."
    )
