"""Makes LiteLLM check keys and log answers for local requests, which do not pass its app.

The module runs in LiteLLM's process.
"""

import asyncio
import contextvars
import datetime
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import litellm
import orjson
from fastapi import HTTPException, Request
from litellm.litellm_core_utils.hidden_params import set_hidden_param
from litellm.proxy import proxy_server
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.auth.user_api_key_auth import user_api_key_auth
from litellm.proxy.litellm_pre_call_utils import LiteLLMProxyRequestSetup
from litellm.types.utils import CustomPricingLiteLLMParams
from litellm.utils import Rules, function_setup

from hearth.proxy.gateway.litellm_messages import KEY_HEADERS, LocalAnswerLog
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Usage

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
_UNNAMED: Final = ("key_check_failed", "throttling_error")  # codes of a 429 without a reason
_NO_TEXT: Final = [{"role": "user", "content": ""}]  # without messages LiteLLM reserves no cost


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A local request that LiteLLM admitted for one of its keys, with the key's reservations.

    `context` holds LiteLLM's context variables with the reservations; logging the answer in that
    context settles them. Every KeyedCall ends in one log, or in `give_back`.
    """

    auth: UserAPIKeyAuth
    data: dict[str, Any]  # the request as LiteLLM's hooks left it, without texts
    context: contextvars.Context


async def owner(method: str, path: str, headers: Headers, group: str) -> str:
    """Return a text that identifies the owner of a request's key; reserve nothing.

    With a `group`, LiteLLM also checks whether the key may use that group now.

    Raises:
        RequestError: LiteLLM refuses, with its status and reason.
    """
    auth = await _authorise(method, path, headers, {"model": group} if group else {})
    return _identity(auth, headers)


async def begin(
    method: str, path: str, headers: Headers, group: str, dialect: str, request_id: str
) -> KeyedCall:
    """Admit a local request within its key's limits, and return its reservations.

    Raises:
        RequestError: LiteLLM refuses; nothing stays reserved.
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
            skip_guardrails=True,  # guardrails need texts, which this process lacks
        )
    except BaseException as error:  # a cancellation too: nothing may stay reserved
        refused = error if isinstance(error, Exception) else None
        await give_back(KeyedCall(auth, data, contextvars.copy_context()), refused)
        if refused is None:
            raise
        raise _refusal(refused) from None
    return KeyedCall(auth, kept or data, contextvars.copy_context())


async def give_back(call: KeyedCall, error: Exception | None = None, **more: Any) -> None:
    """Make LiteLLM release a key's reservations; without an `error` the client has left."""
    failure = proxy_server.proxy_logging_obj.post_call_failure_hook(
        request_data={**call.data, **more},
        original_exception=error or HTTPException(499, "The client is gone."),
        user_api_key_dict=call.auth,
    )
    await asyncio.create_task(failure, context=call.context)


async def _authorise(
    method: str, path: str, headers: Headers, asked: Mapping[str, Any]
) -> UserAPIKeyAuth:
    """Return LiteLLM's authorisation of a request as its app would get it, without texts."""
    sent, body = dict(headers), orjson.dumps(asked)
    passed = [item for item in headers if item[0] not in ("content-length", "content-type")]
    passed += [("content-type", "application/json"), ("content-length", str(len(body)))]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in passed],
        "client": ("127.0.0.1", 0),
        "state": {},
        "app": proxy_server.app,
    }
    check: Any = user_api_key_auth  # takes None for a missing header
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
    """Return the text that identifies the owner, only from what LiteLLM verified.

    If LiteLLM stores the sent key's SHA-256, the text is that key, so that both digests match.
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
    return "sent:" + " ".join(sent)  # a custom_auth that sets no token, user or team


def _refusal(error: Exception) -> RequestError:
    """Return LiteLLM's refusal as a RequestError with its status and reason, on one line."""
    refused: Any = error  # a ProxyException, an HTTPException, or another error with a status
    given = str(getattr(refused, "code", None) or getattr(refused, "status_code", ""))
    kind = getattr(refused, "type", "key_check_failed")  # a text, or an enum of texts
    code = str(getattr(kind, "value", kind))
    if code == "no_db_connection":
        return RequestError(_UNKNOWN, status=401, code="invalid_api_key")
    detail = getattr(refused, "detail", getattr(refused, "message", "") or str(error))
    text = detail.get("error", detail) if isinstance(detail, dict) else detail
    if not given or not text:
        log.warning("LiteLLM could not check a key: %s", type(error).__name__)
        text = "LiteLLM could not check the key; the proxy's log says why."
        return RequestError(text, status=503, code="key_check_failed")
    if given == "429" and code in _UNNAMED:
        code = "rate_limit_exceeded"
    status = int(given) if _STATUS.fullmatch(given) else 401
    return RequestError(" ".join(str(text).split()), status=status, code=code)


PROVIDER: Final = "hearth"
_PROMPT_FIELDS: Final = {
    "chat": "messages",
    "completions": "prompt",
    "messages": "messages",
    "responses": "input",
    "embeddings": "input",
    "rerank": "query",
}
# Fields of a body that are no model parameters.
_PROMPT_NAMES: Final = frozenset((*_PROMPT_FIELDS.values(), "user"))
_PRICES: Final = frozenset(CustomPricingLiteLLMParams.model_fields)


async def log_answer(fields: dict[str, Any], call: KeyedCall | None) -> None:
    """Log one local answer with LiteLLM's callbacks, budgets, limits and spend.

    `fields` are those of a LocalAnswerLog; `call` has the reservations of its key.
    """
    usage = fields.pop("usage")
    answer = LocalAnswerLog(usage=usage and Usage(**usage), **fields)
    context = call.context if call is not None else None
    await asyncio.create_task(_log(answer, call), context=context)


async def _log(answer: LocalAnswerLog, call: KeyedCall | None) -> None:
    router: Any = proxy_server.llm_router
    deployment = router.get_deployment(model_id=answer.deployment_id)
    entry = _entry(answer, deployment, call)
    started, ended = _time(answer.asked_at), _time(answer.ended_at)
    entry.start_time = started
    if answer.first_token_at is not None:
        entry.update_completion_start_time(_time(answer.first_token_at))
    if answer.error is None:
        response = _response(answer, deployment)
        await entry.dispatch_success_handlers(response, start_time=started, end_time=ended)
        if call is not None:  # ends LiteLLM's watch for hanging requests
            await proxy_server.proxy_logging_obj.update_request_status(
                litellm_call_id=answer.request_id, status="success"
            )
        return
    status, text = answer.error
    error = litellm.APIError(
        status_code=status, message=text, llm_provider=PROVIDER, model=answer.model
    )
    if answer.usage is not None:
        response = _response(answer, deployment)
        cost = entry.response_cost_calculator(result=response)
        entry.record_partial_usage_for_failure(response.usage, cost or 0.0)
    await entry.async_failure_handler(error, "", start_time=started, end_time=ended)
    if litellm.failure_callback:  # callbacks that block
        await asyncio.to_thread(entry.failure_handler, error, "", started, ended)
    if call is not None:  # releases the reservations and records the failure
        more = {"litellm_logging_obj": entry, "litellm_call_id": answer.request_id}
        await give_back(call, error, **more)


def _entry(answer: LocalAnswerLog, deployment: Any, call: KeyedCall | None) -> Any:
    """Return LiteLLM's logging object for the answer, as its Router would have made it.

    Each call of LiteLLM begins with `function_setup`, which also makes the config's loggers at
    their first use.
    """
    field = _PROMPT_FIELDS[answer.dialect]
    entry, _ = function_setup(
        CALL_TYPES[answer.dialect],
        Rules(),
        _time(answer.asked_at),
        model=answer.model,
        stream=answer.stream,
        litellm_call_id=answer.request_id,
        litellm_trace_id=answer.session or answer.request_id,
        litellm_session_id=answer.session or None,
        custom_llm_provider=PROVIDER,
        **{field: answer.body.get(field) or ""},
    )
    user = answer.body.get("user")
    entry.update_environment_variables(
        model=answer.model,
        user=user if isinstance(user, str) else "",
        optional_params={
            name: value for name, value in answer.body.items() if name not in _PROMPT_NAMES
        },
        litellm_params=_params(answer, deployment, call),
        custom_llm_provider=PROVIDER,
    )
    return entry


def _params(answer: LocalAnswerLog, deployment: Any, call: KeyedCall | None) -> dict[str, Any]:
    info = deployment.model_info.model_dump(exclude_none=True)
    metadata: dict[str, Any] = {
        "model_group": answer.group,
        "deployment": f"{PROVIDER}/{answer.model}",
        "model_info": info,
    }
    if call is not None:
        metadata = {**call.data.get("metadata", {}), **metadata}
    return {
        **_prices(deployment),
        "metadata": metadata,
        "model_info": info,
        "litellm_call_id": answer.request_id,
        "litellm_session_id": answer.session or None,
        "custom_llm_provider": PROVIDER,
        "api_base": "",
        "acompletion": True,  # otherwise LiteLLM assumes a call of the synchronous SDK
        "proxy_server_request": {"url": "", "method": "POST", "headers": {}, "body": {}},
    }


def _prices(deployment: Any) -> dict[str, Any]:
    """Return the config's token prices of a local deployment; mostly none."""
    params = deployment.litellm_params.model_dump(exclude_none=True)
    return {name: params[name] for name in _PRICES & params.keys()}


def _response(answer: LocalAnswerLog, deployment: Any) -> Any:
    """Return the answer as a chat completion, the form in which LiteLLM logs every dialect."""
    kind: Any = litellm.ModelResponse
    said: dict[str, Any] = {"message": _message(answer)}
    usage = answer.usage or Usage(0, 0, 0, 0)
    if answer.dialect == "completions":
        kind, said = litellm.TextCompletionResponse, {"text": answer.text}
    response = kind(
        id=answer.request_id,
        model=answer.group,
        choices=[{"index": 0, "finish_reason": answer.finish_reason, **said}],
        usage=litellm.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens or None,
            prompt_tokens_details={"cached_tokens": usage.cached_tokens},
        ),
    )
    set_hidden_param(response, "model_id", answer.deployment_id)
    if not _prices(deployment):
        set_hidden_param(response, "response_cost", 0.0)  # otherwise LiteLLM would look up a price
    return response


def _message(answer: LocalAnswerLog) -> dict[str, Any]:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in answer.calls
    ]
    return {
        "role": "assistant",
        "content": answer.text,
        **({"reasoning_content": answer.thinking} if answer.thinking else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _time(seconds: float) -> datetime.datetime:
    """Return a local time without a time zone, as LiteLLM's times are."""
    return datetime.datetime.fromtimestamp(seconds)
