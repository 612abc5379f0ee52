"""Runs LiteLLM's own check of a client's key, for requests that never pass through its app.

It runs in LiteLLM's process.
"""

import asyncio
import contextvars
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import orjson
from fastapi import HTTPException, Request
from litellm.proxy import proxy_server
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.auth.user_api_key_auth import user_api_key_auth
from litellm.proxy.litellm_pre_call_utils import LiteLLMProxyRequestSetup

from hearth.proxy.gateway.litellm_messages import KEY_HEADERS
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

Headers = Sequence[tuple[str, str]]

CALL_TYPES: Final = {
    "chat": "acompletion",
    "completions": "atext_completion",
    "messages": "anthropic_messages",
    "responses": "aresponses",
    "embeddings": "aembedding",
    "rerank": "arerank",
}
_STATUS: Final = re.compile("[45][0-9][0-9]")
_UNKNOWN: Final = (
    "The API key is wrong: it is not LiteLLM's master key, and no database has others. Send it as "
    "'Authorization: Bearer KEY' or 'x-api-key: KEY'."
)
_UNNAMED: Final = ("key_check_failed", "throttling_error")  # what a 429 has that names no reason
_NO_TEXT: Final = [{"role": "user", "content": ""}]  # without messages no price is reserved


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A local request that LiteLLM's own keys let in: what its limits and its spend are booked on.

    `context` holds LiteLLM's notes of what it reserved; they are given back where the answer's log
    runs in it. Every KeyedCall ends in one log, or in `give_back`.
    """

    auth: UserAPIKeyAuth
    data: dict[str, Any]  # the request as LiteLLM's hooks left it; no text of it
    context: contextvars.Context


async def owner(method: str, path: str, headers: Headers, group: str) -> str:
    """Return whose a request is; with a `group` also whether its key may ask for that now.

    Nothing is reserved.

    Raises:
        RequestError: LiteLLM says no, with its status and reason.
    """
    auth = await _authorise(method, path, headers, {"model": group} if group else {})
    return _identity(auth, headers)


async def begin(
    method: str, path: str, headers: Headers, group: str, dialect: str, request_id: str
) -> KeyedCall:
    """Return what a local answer is booked on, once the key's limits have let it in.

    Raises:
        RequestError: LiteLLM says no; nothing stays reserved.
    """
    auth = await _authorise(method, path, headers, {"model": group, "messages": _NO_TEXT})
    data: dict[str, Any] = {"model": group, "litellm_call_id": request_id, "metadata": {}}
    LiteLLMProxyRequestSetup.add_user_api_key_auth_to_request_metadata(data, auth, "metadata")
    hooks: Any = proxy_server.proxy_logging_obj
    try:
        kept = await hooks.pre_call_hook(
            user_api_key_dict=auth,
            data=data,
            call_type=CALL_TYPES[dialect],
            skip_guardrails=True,  # they read and change texts, and none is here
        )
    except BaseException as error:  # also where the client has left: nothing stays reserved
        refused = error if isinstance(error, Exception) else None
        await give_back(KeyedCall(auth, data, contextvars.copy_context()), refused)
        if refused is None:
            raise
        raise _refusal(refused) from None
    return KeyedCall(auth, kept or data, contextvars.copy_context())


async def give_back(call: KeyedCall, error: Exception | None = None, **more: Any) -> None:
    """Have what a key has reserved given back; without an `error` its client has left."""
    failure = proxy_server.proxy_logging_obj.post_call_failure_hook(
        request_data={**call.data, **more},
        original_exception=error or HTTPException(499, "The client is gone."),
        user_api_key_dict=call.auth,
    )
    await asyncio.create_task(failure, context=call.context)


async def _authorise(
    method: str, path: str, headers: Headers, asked: Mapping[str, Any]
) -> UserAPIKeyAuth:
    """Return LiteLLM's word on a request as its app would see it; no text is in it."""
    sent, body = dict(headers), orjson.dumps(asked)
    rows = [row for row in headers if row[0] not in ("content-length", "content-type")]
    rows += [("content-type", "application/json"), ("content-length", str(len(body)))]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in rows],
        "client": ("127.0.0.1", 0),
        "state": {},
        "app": proxy_server.app,
    }
    check: Any = user_api_key_auth  # which takes None for a header that is not there
    try:
        found: UserAPIKeyAuth = await check(
            Request(scope, receive),
            api_key=sent.get("authorization"),
            azure_api_key_header=sent.get("api-key"),
            anthropic_api_key_header=sent.get("x-api-key"),
            google_ai_studio_api_key_header=None,
            azure_apim_header=None,
            custom_litellm_key_header=sent.get("x-litellm-api-key"),
        )
        return found
    except Exception as error:
        raise _refusal(error) from None


def _identity(auth: UserAPIKeyAuth, headers: Headers) -> str:
    """Return what names the owner: LiteLLM's word, and never what a client merely says.

    It is the key that was sent where LiteLLM knows it by its SHA-256, so that the owner's digest
    is that of the key.
    """
    named = proxy_server.general_settings.get("litellm_key_header_name")
    names = [name.decode() for name in KEY_HEADERS] + ([str(named).lower()] if named else [])
    texts = [dict(headers).get(name, "").strip() for name in names]
    sent = [text[7:].strip() if text[:7].lower() == "bearer " else text for text in texts]
    token = auth.token or ""
    for text in sent:
        if sha256(text.encode()).hexdigest() == token:
            return text
    if token:
        return f"token:{token}"
    if auth.user_id or auth.team_id:
        return f"user:{auth.user_id}:{auth.team_id}:{auth.org_id}"
    return "sent:" + " ".join(sent)  # a custom_auth that names nobody


def _refusal(error: Exception) -> RequestError:
    """Return LiteLLM's refusal as ours: its status and its reason, on one line."""
    told: Any = error  # a ProxyException, an HTTPException, or one that has a status
    given = str(getattr(told, "code", None) or getattr(told, "status_code", ""))
    kind = getattr(told, "type", "key_check_failed")  # a text, or an enum of texts
    code = str(getattr(kind, "value", kind))
    if code == "no_db_connection":
        return RequestError(_UNKNOWN, status=401, code="invalid_api_key")
    detail = getattr(told, "detail", getattr(told, "message", "") or str(error))
    text = detail.get("error", detail) if isinstance(detail, dict) else detail
    if not given or not text:
        log.warning("LiteLLM could not check a key: %s", type(error).__name__)
        text = "LiteLLM could not check the key; the proxy's log says why."
        return RequestError(text, status=503, code="key_check_failed")
    if given == "429" and code in _UNNAMED:
        code = "rate_limit_exceeded"
    status = int(given) if _STATUS.fullmatch(given) else 401
    return RequestError(" ".join(str(text).split()), status=status, code=code)
