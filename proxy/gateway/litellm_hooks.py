"""Hooks into LiteLLM's Router: pins calls to a deployment, and records failures and costs.

LiteLLM imports this module in its own process, by its name in the merged config. A hook finds its
call by a context variable, which is set in the task that runs LiteLLM's app for the call.
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
    """One choice of a deployment, or one call. Owner: the task of its connection."""

    pinned: str = ""  # id of the only deployment that may be called; "" = any
    excluded: Collection[str] = ()
    preferred: str = ""  # id of the deployment to choose if it is healthy
    failure: BaseException | None = None  # exception behind the last error of LiteLLM's app


current_call: ContextVar[RoutedCall | None] = ContextVar("current_call", default=None)


class RoutingHook(CustomLogger):
    """Narrows the healthy deployments of a group to those that the call may use.

    The hook reports a cloud call's usage when LiteLLM logs the call, after the reply's end.
    """

    on_usage: Callable[[dict[str, Any]], None]  # called with the fields of a CloudUsage

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
    """Return the usage of a gateway's call; None for other calls, and for one without usage.

    A header of the call carries the request id.
    """
    params = kwargs.get("litellm_params") or {}
    headers = (params.get("proxy_server_request") or {}).get("headers") or {}
    request_id = headers.get(REQUEST_HEADER)
    log_entry = kwargs.get("standard_logging_object")
    if not isinstance(request_id, str) or log_entry is None:
        return None
    prompt, completion = (
        int(log_entry["prompt_tokens"] or 0),
        int(log_entry["completion_tokens"] or 0),
    )
    cost = float(log_entry["response_cost"] or 0.0)
    if log_entry["status"] != "success" and not (prompt or completion or cost):
        return None
    usage = (log_entry.get("metadata") or {}).get("usage_object") or {}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "request_id": request_id,
        "deployment_id": str(log_entry["model_id"]),
        "prompt_tokens": prompt,
        "cached_tokens": int(details.get("cached_tokens") or 0),
        "completion_tokens": completion,
        "cost": cost,
    }


async def authorise(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Accept every request: only the proxy reaches the app, and it has checked the client's key."""
    return UserAPIKeyAuth()


routing_hook: Final = RoutingHook()
local_model: Final = CustomLLM()  # a mere entry in LiteLLM: local requests never reach it
