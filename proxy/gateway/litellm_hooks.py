"""Tells LiteLLM which deployment a call is pinned to, and notes why one failed.

LiteLLM imports this module by its name in the merged config, in its own thread. All calls come on
its event loop. What belongs to a call is found by a context variable that is set in the task that
runs LiteLLM's app for it.
"""

import hmac
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import HTTPException, Request
from litellm import CustomLLM
from litellm.integrations.custom_logger import CustomLogger
from litellm.llms.custom_llm import CustomLLMError
from litellm.proxy._types import UserAPIKeyAuth

app_token: Final = "sk-" + secrets.token_hex(32)  # new at each start; never leaves the process


@dataclass(slots=True)
class RoutedCall:
    """What is known of one choice or call. Owner: LiteLLM's thread."""

    pinned: str = ""  # id of the deployment that alone may be called; "" = any
    excluded: frozenset[str] = field(default_factory=frozenset)
    preferred: str = ""  # id of the deployment to choose if it is healthy
    failure: BaseException | None = None  # what LiteLLM's app made its last error from

    def enter(self) -> None:
        """Have the hooks find this in the current task."""
        current_call.set(self)


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
        rows = [row for row in healthy_deployments if self._may_take(call, _id_of(row))]
        liked = [row for row in rows if _id_of(row) == call.preferred]
        return liked or rows

    def _may_take(self, call: RoutedCall, deployment_id: str) -> bool:
        return deployment_id == call.pinned if call.pinned else deployment_id not in call.excluded

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


class LocalModel(CustomLLM):
    """Stands for the local models in LiteLLM's list; their requests are never sent through it."""

    async def acompletion(self, *args: Any, **kwargs: Any) -> Any:
        raise CustomLLMError(500, "local models are not called through LiteLLM")

    async def astreaming(self, *args: Any, **kwargs: Any) -> Any:
        raise CustomLLMError(500, "local models are not called through LiteLLM")
        yield  # LiteLLM wants an async generator


async def authorise(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Accept what came through our edge, which has checked the client's own key."""
    if not hmac.compare_digest(api_key.encode(), app_token.encode()):
        raise HTTPException(401, "not through the edge")
    return UserAPIKeyAuth(api_key=app_token)


def _id_of(deployment: Any) -> str:
    return str((deployment.get("model_info") or {}).get("id"))


routing_hook: Final = RoutingHook()
local_model: Final = LocalModel()
