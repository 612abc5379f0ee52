"""Holds the pinned LiteLLM to what the gateway uses of it, names and signatures."""

import asyncio
import inspect
from importlib.metadata import version
from typing import Any

import litellm
import pytest
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import RouterErrors

from hearth.proxy.gateway import litellm_hooks, litellm_messages
from hearth.proxy.gateway.config import fallback_lists
from hearth.shared.settings_from_env import PROJECT_DIR


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_the_pinned_one() -> None:
    assert f'"litellm=={version("litellm")}"' in (PROJECT_DIR / "pyproject.toml").read_text()


@pytest.mark.filterwarnings("ignore:Items .* `ReadOnly`:UserWarning")  # of what it first imports
def test_the_router_chooses_by_a_public_method() -> None:
    taken = ["router", "model", "request_kwargs", "messages", "input", "specific_deployment"]
    assert parameters(litellm.Router.async_get_available_deployment) == taken


@pytest.mark.parametrize("name", ["async_filter_deployments", "async_post_call_failure_hook"])
def test_the_hooks_are_those_that_litellm_calls(name: str) -> None:
    ours, theirs = getattr(litellm_hooks.RoutingHook, name), getattr(CustomLogger, name)
    assert parameters(ours) == parameters(theirs)


def test_the_texts_and_numbers_that_we_repeat_are_litellms() -> None:
    told = RouterErrors.no_deployments_with_provider_budget_routing.value
    assert litellm_messages.OVER_BUDGET in told.lower()
    assert fallback_lists.STEPS_MAX == litellm.ROUTER_MAX_FALLBACKS


def test_a_local_model_is_never_answered_through_litellm() -> None:
    asked: Any = dict.fromkeys(parameters(litellm_hooks.local_model.acompletion))
    with pytest.raises(Exception, match="Not implemented"):
        asyncio.run(litellm_hooks.local_model.acompletion(**asked))


def test_without_a_call_the_hook_leaves_the_deployments_alone() -> None:
    rows = [{"model_info": {"id": "a"}}, {"model_info": {"id": "b"}}]

    async def narrowed(call: litellm_hooks.RoutedCall | None) -> list[Any]:
        litellm_hooks.current_call.set(call)
        return await litellm_hooks.routing_hook.async_filter_deployments("m", rows, None)

    assert asyncio.run(narrowed(None)) == rows
    assert asyncio.run(narrowed(litellm_hooks.RoutedCall(pinned="b"))) == rows[1:]
    assert asyncio.run(narrowed(litellm_hooks.RoutedCall(pinned="gone"))) == []
    assert asyncio.run(narrowed(litellm_hooks.RoutedCall(preferred="gone"))) == rows
