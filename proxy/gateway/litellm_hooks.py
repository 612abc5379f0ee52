"""Has LiteLLM's Router take the deployment that a call is pinned to; notes failures and costs.

LiteLLM imports this module by its name in the merged config, in its own process. What belongs to a
call is found by a context variable that is set in the task that runs LiteLLM's app for it.
"""

from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from litellm import CustomLLM
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import UserAPIKeyAuth

from hearth.proxy.gateway.litellm_messages import REQUEST_HEADER


@dataclass(slots=True)
class RoutedCall:
    """What is known of one choice or call. Owner: the task of its connection."""

    pinned: str = ""  # id of the deployment that alone may be called; "" = any
    excluded: Collection[str] = ()
    preferred: str = ""  # id of the deployment to choose if it is healthy
    failure: BaseException | None = None  # what LiteLLM's app made its last error from


current_call: ContextVar[RoutedCall | None] = ContextVar("current_call", default=None)


class RoutingHook(CustomLogger):
    """Narrows the healthy deployments of a group to those that the call may take.

    It tells what a cloud call cost when LiteLLM logs it, after the reply's end.
    """

    on_usage: Callable[[dict[str, Any]], None]  # is told the fields of a CloudUsage

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Any],
        messages: Any,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[Any]:
        call = current_call.get()
        if call is None:
            return healthy_deployments
        by_id = {str((row.get("model_info") or {}).get("id")): row for row in healthy_deployments}
        wanted = call.pinned or call.preferred
        if call.pinned or (wanted in by_id and wanted not in call.excluded):
            return [by_id[wanted]] if wanted in by_id else []
        return [row for name, row in by_id.items() if name not in call.excluded]

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        call = current_call.get()
        if call is not None:
            call.failure = original_exception

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        if (usage := cloud_usage(kwargs)) is not None:
            self.on_usage(usage)

    async_log_failure_event = async_log_success_event


def cloud_usage(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a call of ours cost; None of another's, and of one that cost nothing.

    Which request it was is told by a header that our call carries.
    """
    params = kwargs.get("litellm_params") or {}
    headers = (params.get("proxy_server_request") or {}).get("headers") or {}
    request_id = headers.get(REQUEST_HEADER)
    told = kwargs.get("standard_logging_object")
    if not isinstance(request_id, str) or told is None:
        return None
    prompt, completion = int(told["prompt_tokens"] or 0), int(told["completion_tokens"] or 0)
    cost = float(told["response_cost"] or 0.0)
    if told["status"] != "success" and not (prompt or completion or cost):
        return None
    usage = (told.get("metadata") or {}).get("usage_object") or {}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "request_id": request_id,
        "deployment_id": str(told["model_id"]),
        "prompt_tokens": prompt,
        "cached_tokens": int(details.get("cached_tokens") or 0),
        "completion_tokens": completion,
        "cost": cost,
    }


async def authorise(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Accept all: the proxy alone reaches the app, and has checked the client's own key."""
    return UserAPIKeyAuth()


routing_hook: Final = RoutingHook()
local_model: Final = CustomLLM()  # in LiteLLM's list; its requests are never sent through it
