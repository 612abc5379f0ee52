"""Has LiteLLM's Router take the deployment that a call is pinned to, and notes why one failed.

LiteLLM imports this module by its name in the merged config, in its own process. What belongs to a
call is found by a context variable that is set in the task that runs LiteLLM's app for it.
"""

from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from litellm import CustomLLM
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import UserAPIKeyAuth


@dataclass(slots=True)
class RoutedCall:
    """What is known of one choice or call. Owner: the task of its connection."""

    pinned: str = ""  # id of the deployment that alone may be called; "" = any
    excluded: Collection[str] = ()
    preferred: str = ""  # id of the deployment to choose if it is healthy
    failure: BaseException | None = None  # what LiteLLM's app made its last error from


current_call: ContextVar[RoutedCall | None] = ContextVar("current_call", default=None)


class RoutingHook(CustomLogger):
    """Narrows the healthy deployments of a group to those that the call may take."""

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


async def authorise(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Accept all: the proxy alone reaches the app, and has checked the client's own key."""
    return UserAPIKeyAuth()


routing_hook: Final = RoutingHook()
local_model: Final = CustomLLM()  # in LiteLLM's list; its requests are never sent through it
