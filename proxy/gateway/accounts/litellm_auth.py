"""Runs LiteLLM's own check of a client's key, for requests that never pass through its app.

All of it runs on LiteLLM's event loop, and importing it imports LiteLLM: only what has started
that loop may do so.
"""

import contextvars
import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

import orjson
from fastapi import HTTPException, Request
from litellm.proxy import proxy_server
from litellm.proxy._types import ProxyException, UserAPIKeyAuth
from litellm.proxy.auth.user_api_key_auth import user_api_key_auth
from litellm.proxy.litellm_pre_call_utils import LiteLLMProxyRequestSetup

from hearth.proxy.gateway.accounts.litellm_keys import (
    KEY_HEADERS,
    KeyCaller,
    KeyOwner,
    route_of,
)
from hearth.proxy.gateway.accounts.litellm_usage import AccountDialect, KeyedCall
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

TEXT_CHARS_MAX: Final = 600  # of LiteLLM's reason
_CALL_TYPES: Final[dict[AccountDialect, str]] = {
    "chat": "acompletion",
    "completions": "atext_completion",
    "messages": "anthropic_messages",
    "responses": "aresponses",
    "embeddings": "aembedding",
    "rerank": "arerank",
}
_LIMITED: Final = (429, 503)
_UNNAMED: Final = ("key_check_failed", "throttling_error")  # what a 429 has that names no reason
_NO_TEXT: Final = [{"role": "user", "content": ""}]  # without messages no price is reserved


async def owner(caller: KeyCaller, group: str) -> KeyOwner:
    """Return whose a request is; with a `group` also whether its key may ask for that now.

    Nothing is reserved.

    Raises:
        RequestError: LiteLLM says no, with its status and reason.
    """
    return await _owner(caller, {"model": group} if group else {})


async def begin(
    caller: KeyCaller, group: str, dialect: AccountDialect, request_id: str
) -> tuple[KeyOwner, KeyedCall]:
    """Return what a local answer is booked on, once the key's limits have let it in.

    Raises:
        RequestError: LiteLLM says no; nothing stays reserved.
    """
    found = await _owner(caller, {"model": group, "messages": _NO_TEXT, **_limit(caller)})
    data: dict[str, Any] = {"model": group, "litellm_call_id": request_id, "metadata": {}}
    LiteLLMProxyRequestSetup.add_user_api_key_auth_to_request_metadata(data, found.auth, "metadata")
    hooks: Any = proxy_server.proxy_logging_obj
    try:
        kept = await hooks.pre_call_hook(
            user_api_key_dict=found.auth,
            data=data,
            call_type=_CALL_TYPES[dialect],
            skip_guardrails=True,  # they read and change texts, and none is here
        )
    except BaseException as error:  # also where the client has left: nothing stays reserved
        await hooks.post_call_failure_hook(
            request_data=data,
            original_exception=(
                error if isinstance(error, Exception) else HTTPException(499, "The client is gone.")
            ),
            user_api_key_dict=found.auth,
        )
        if isinstance(error, Exception):
            raise _refusal(error) from None
        raise
    return found, KeyedCall(found.auth, kept or data, contextvars.copy_context())


async def _owner(caller: KeyCaller, asked: Mapping[str, Any]) -> KeyOwner:
    auth = await _authorise(caller, asked)
    return KeyOwner(_identity(auth, caller), auth)


def _limit(caller: KeyCaller) -> dict[str, int]:
    return {} if caller.tokens_max is None else {"max_tokens": caller.tokens_max}


async def _authorise(caller: KeyCaller, asked: Mapping[str, Any]) -> UserAPIKeyAuth:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in caller.headers}
    check: Any = user_api_key_auth  # which takes None for a header that is not there
    try:
        found: UserAPIKeyAuth = await check(
            _request(caller, asked),
            api_key=headers.get("authorization"),
            azure_api_key_header=headers.get("api-key"),
            anthropic_api_key_header=headers.get("x-api-key"),
            google_ai_studio_api_key_header=None,
            azure_apim_header=None,
            custom_litellm_key_header=headers.get("x-litellm-api-key"),
        )
        return found
    except Exception as error:
        is_sent = any(headers.get(name) for name in map(bytes.decode, KEY_HEADERS))
        raise _refusal(error, is_sent=is_sent) from None


def _request(caller: KeyCaller, asked: Mapping[str, Any]) -> Request:
    """Return a request as LiteLLM's app would see it; its body is `asked`, with no text in it."""
    body = orjson.dumps(asked)
    kept = [row for row in caller.headers if row[0] not in (b"content-length", b"content-type")]
    headers = [
        *kept,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": caller.method,
        "path": route_of(caller.path),
        "query_string": b"",
        "headers": headers,
        "client": (caller.client, 0),
        "state": {},
        "app": proxy_server.app,
    }
    return Request(scope, receive)


def _identity(auth: UserAPIKeyAuth, caller: KeyCaller) -> str:
    """Return what names the owner: LiteLLM's word, and never what a client merely says.

    It is the key that was sent where LiteLLM knows it by its SHA-256, so that the owner's digest
    is that of the key.
    """
    token = auth.token or ""
    for sent in _sent(caller):
        if sha256(sent.encode()).hexdigest() == token:
            return sent
    if token:
        return f"token:{token}"
    if auth.user_id or auth.team_id:
        return f"user:{auth.user_id}:{auth.team_id}:{auth.org_id}"
    return "sent:" + " ".join(_sent(caller))  # a custom_auth that names nobody


def _sent(caller: KeyCaller) -> list[str]:
    """Return every text that may be the key, in the order of the headers."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in caller.headers}
    named = proxy_server.general_settings.get("litellm_key_header_name")
    known = [name.decode() for name in KEY_HEADERS]
    names = [*known, str(named).lower()] if named else known
    texts = [headers.get(name, "").strip() for name in names]
    return [text[7:].strip() if text[:7].lower() == "bearer " else text for text in texts]


def _refusal(error: Exception, *, is_sent: bool = True) -> RequestError:
    """Return LiteLLM's refusal as ours: its status and its reason, on one line."""
    status, text, code = 500, "", "key_check_failed"
    if isinstance(error, ProxyException):
        status, text, code = _status(error.code), str(error.message), _word(error.type)
    elif isinstance(error, HTTPException):
        detail = error.detail
        text = str(detail.get("error", detail)) if isinstance(detail, dict) else str(detail)
        status = error.status_code
    elif isinstance(status_code := getattr(error, "status_code", None), int):
        status, text = status_code, str(error)
    if status == 429 and code in _UNNAMED:
        code = "rate_limit_exceeded"
    if not is_sent and status not in _LIMITED:
        return _wrong("An API key is required.")
    if code == "no_db_connection":
        return _wrong("The API key is wrong: it is not LiteLLM's master key, and no database has "
                      "others.")  # fmt: skip
    if not text:
        log.warning("LiteLLM could not check a key: %s", type(error).__name__)
        text = "LiteLLM could not check the key; the proxy's log says why."
        return RequestError(text, status=503, code="key_check_failed")
    text = " ".join(text.split())[:TEXT_CHARS_MAX]
    return RequestError(text, status=status, code=code)


def _wrong(text: str) -> RequestError:
    more = "Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    return RequestError(f"{text} {more}", status=401, code="invalid_api_key")


def _status(code: str | int | None) -> int:
    text = str(code)
    return int(text) if text.isascii() and text.isdigit() and 400 <= int(text) < 600 else 401


def _word(kind: Any) -> str:
    """Return the name of a kind of error, which LiteLLM has as a text or an enum of texts."""
    return str(getattr(kind, "value", kind))
