"""Writes LiteLLM's log of a local answer.

It runs in LiteLLM's process.
"""

import asyncio
import datetime
from typing import Any, Final

import litellm
from litellm.litellm_core_utils.hidden_params import set_hidden_param
from litellm.proxy import proxy_server
from litellm.types.utils import CustomPricingLiteLLMParams
from litellm.utils import Rules, function_setup

from hearth.proxy.gateway.accounts.litellm_auth import CALL_TYPES, KeyedCall, give_back
from hearth.proxy.gateway.litellm_messages import LocalAnswerLog
from hearth.shared.wire_messages import Usage

PROVIDER: Final = "hearth"
_PROMPT_FIELDS: Final = {
    "chat": "messages",
    "completions": "prompt",
    "messages": "messages",
    "responses": "input",
    "embeddings": "input",
    "rerank": "query",
}
_ASKED: Final = frozenset((*_PROMPT_FIELDS.values(), "user"))  # in a body, and no parameters
_PRICES: Final = frozenset(CustomPricingLiteLLMParams.model_fields)


async def log_answer(told: dict[str, Any], call: KeyedCall | None) -> None:
    """Have LiteLLM's callbacks, budgets, limits and spend take one local answer, once.

    `told` is a LocalAnswerLog's fields; `call` is what its key's limits are booked on.
    """
    usage = told.pop("usage")
    answer = LocalAnswerLog(usage=usage and Usage(**usage), **told)
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
        if call is not None:  # LiteLLM's watch for requests that hang
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
    if litellm.failure_callback:  # the old ones, which block
        await asyncio.to_thread(entry.failure_handler, error, "", started, ended)
    if call is not None:  # what its budget has reserved is given back, its failure written down
        more = {"litellm_logging_obj": entry, "litellm_call_id": answer.request_id}
        await give_back(call, error, **more)


def _entry(answer: LocalAnswerLog, deployment: Any, call: KeyedCall | None) -> Any:
    """Return LiteLLM's own record of a call, as its Router would have made it.

    `function_setup` is how each of its calls begins: it also makes loggers that a config names
    and that no call has needed yet.
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
        optional_params={name: each for name, each in answer.body.items() if name not in _ASKED},
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
        "acompletion": True,  # else it takes this for a call of its synchronous SDK
        "proxy_server_request": {"url": "", "method": "POST", "headers": {}, "body": {}},
    }


def _prices(deployment: Any) -> dict[str, Any]:
    """Return what the config says that tokens of a local deployment cost; mostly nothing."""
    params = deployment.litellm_params.model_dump(exclude_none=True)
    return {name: params[name] for name in _PRICES & params.keys()}


def _response(answer: LocalAnswerLog, deployment: Any) -> Any:
    """Return the answer in the form in which LiteLLM logs every dialect's: a chat completion."""
    kind: Any = litellm.ModelResponse
    said: dict[str, Any] = {"message": _said(answer)}
    if answer.dialect == "completions":
        kind, said = litellm.TextCompletionResponse, {"text": answer.text}
    response = kind(
        id=answer.request_id,
        model=answer.group,
        choices=[{"index": 0, "finish_reason": answer.finish_reason, **said}],
        usage=_usage(answer.usage or Usage(0, 0, 0, 0)),
    )
    set_hidden_param(response, "model_id", answer.deployment_id)
    if not _prices(deployment):
        set_hidden_param(response, "response_cost", 0.0)  # LiteLLM has no price of it either
    return response


def _said(answer: LocalAnswerLog) -> dict[str, Any]:
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


def _usage(usage: Usage) -> Any:
    return litellm.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens or None,
        prompt_tokens_details={"cached_tokens": usage.cached_tokens},
    )


def _time(seconds: float) -> datetime.datetime:
    """Return a local time without its zone, as all of LiteLLM's are."""
    return datetime.datetime.fromtimestamp(seconds)
