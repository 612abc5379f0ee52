"""Holds the pinned LiteLLM, and the official APIs' types, to what the gateway uses of them."""

import asyncio
import inspect
from typing import Any

import litellm
import pytest
from anthropic.types.beta import message_count_tokens_params, message_create_params
from litellm.integrations.custom_logger import CustomLogger
from litellm.litellm_core_utils.url_utils import SSRFError, validate_url
from litellm.responses.utils import ResponsesAPIRequestUtils
from litellm.types.router import RouterErrors
from litellm.types.utils import is_litellm_owned_kwarg
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from hearth.proxy.gateway import cloud_fields, litellm_hooks, litellm_messages, routing_table
from hearth.shared.our_ids import is_our_response_id, response_maker

OFFICIAL: dict[str, Any] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "messages": message_create_params.MessageCreateParamsBase,
    "messages_count": message_count_tokens_params.MessageCountTokensParams,
    "responses": response_create_params.ResponseCreateParamsBase,
    "responses_count": input_token_count_params.InputTokenCountParams,
    "embeddings": embedding_create_params.EmbeddingCreateParams,
}
# `metadata` passes as the user's id alone; the others are the stream's switch and sampling fields
# that the SDK still sends or has moved.
BESIDE_OFFICIAL = {"stream", "temperature", "top_p", "top_k", "output_format", "betas"}
OWNED_BUT_JUDGED = {"metadata"}
REFUSED = {"thread", "prompt", "background"}  # in counts too


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ---------------------------------------------------------------- LiteLLM


@pytest.mark.filterwarnings("ignore:Items .* `ReadOnly`:UserWarning")  # of what it first imports
def test_what_we_call_repeat_and_are_called_by_is_litellms() -> None:
    taken = ["router", "model", "request_kwargs", "messages", "input", "specific_deployment"]
    assert parameters(litellm.Router.async_get_available_deployment) == taken
    for name in ("async_filter_deployments", "async_post_call_failure_hook"):
        ours, theirs = getattr(litellm_hooks.RoutingHook, name), getattr(CustomLogger, name)
        assert parameters(ours) == parameters(theirs)
    told = RouterErrors.no_deployments_with_provider_budget_routing.value
    assert litellm_messages.OVER_BUDGET in told.lower()
    assert routing_table.STEPS_MAX == litellm.ROUTER_MAX_FALLBACKS


def test_without_a_call_the_hook_leaves_the_deployments_alone() -> None:
    rows = [{"model_info": {"id": "a"}}, {"model_info": {"id": "b"}}]

    async def narrowed(call: litellm_hooks.RoutedCall | None) -> list[Any]:
        litellm_hooks.current_call.set(call)
        return await litellm_hooks.routing_hook.async_filter_deployments("m", rows, None)

    assert asyncio.run(narrowed(None)) == rows
    assert asyncio.run(narrowed(litellm_hooks.RoutedCall(pinned="b"))) == rows[1:]
    assert asyncio.run(narrowed(litellm_hooks.RoutedCall(pinned="gone"))) == []
    assert asyncio.run(narrowed(litellm_hooks.RoutedCall(preferred="gone"))) == rows


def test_litellms_id_of_a_response_is_read() -> None:
    def given(response_id: str) -> str:
        found = ResponsesAPIRequestUtils.update_responses_api_response_id_with_model_id(
            {"id": response_id, "output": []}, "openai", {"model_info": {"id": "dep-1"}}
        )
        assert isinstance(found, dict)
        return str(found["id"])

    native = given("resp_68af4030592c81938ec0a5fbab4a3e9f05438e46b5f69a3b")
    assert response_maker(native) == "dep-1"
    assert not is_our_response_id(native)
    assert response_maker(given("chatcmpl-1")) == ""  # no Responses API: nothing is kept there


def test_litellm_looks_at_addresses_itself_unless_it_is_told_not_to() -> None:
    """Names are judged by their form here: where they lead, only who connects can tell."""
    assert litellm.user_url_validation is True
    with pytest.raises(SSRFError):
        validate_url("https://127.0.0.1/a.png")


# ---------------------------------------------------------------- the fields that pass


def fields_of(shape: Any) -> set[str]:
    return {name for base in shape.__mro__ for name in getattr(base, "__annotations__", {})}


@pytest.mark.parametrize("dialect", list(cloud_fields.BODY))
def test_each_field_is_one_of_the_official_apis_and_none_that_litellm_owns(dialect: str) -> None:
    names = cloud_fields.BODY[dialect].names
    assert names <= fields_of(OFFICIAL[dialect]) | BESIDE_OFFICIAL | REFUSED
    assert set(filter(is_litellm_owned_kwarg, names)) <= OWNED_BUT_JUDGED | REFUSED


def test_a_local_model_is_never_answered_through_litellm() -> None:
    asked: Any = dict.fromkeys(parameters(litellm_hooks.local_model.acompletion))
    with pytest.raises(Exception, match="Not implemented"):
        asyncio.run(litellm_hooks.local_model.acompletion(**asked))
