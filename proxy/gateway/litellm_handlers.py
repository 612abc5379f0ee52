"""Answers the three calls that LiteLLM makes to us: chat completions, Anthropic Messages, keys.

Each takes the request from the ticket that the app made; what LiteLLM itself passes is the relay's
placeholder. Only litellm_app may import this module, since it imports LiteLLM.
"""

import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import HTTPException, Request
from litellm import CustomLLM
from litellm.llms.anthropic.pass_through.messages.interceptors.base import MessagesInterceptor
from litellm.llms.custom_llm import CustomLLMError
from litellm.proxy._types import UserAPIKeyAuth
from litellm.types.utils import (
    Choices as ModelChoice,
    CompletionTokensDetailsWrapper,
    Delta,
    Message,
    ModelResponse,
    ModelResponseStream,
    PromptTokensDetailsWrapper,
    StreamingChoices,
    Usage,
)

from hearth.proxy.api import chat_completions, usage_extras
from hearth.proxy.api.messages import messages_events
from hearth.proxy.api.multi_choice_stream import MergedChoices
from hearth.proxy.request.parsed_request import AdmittedRequest, current_request
from hearth.shared import wire_messages
from hearth.shared.errors import RequestError

PROVIDER: Final = "hearth"
edge_token: Final = "sk-" + secrets.token_hex(32)  # new at each start; known to the edge alone


async def authorise(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Accept what came through the edge, which has checked the client's own key."""
    if not hmac.compare_digest(api_key.encode(), edge_token.encode()):
        raise HTTPException(401, "not through the edge")
    return UserAPIKeyAuth(api_key=edge_token)


def _broken(ticket: AdmittedRequest, error: RequestError) -> CustomLLMError:
    """Note why the answer broke off, where the relay finds it, and return what LiteLLM is told."""
    ticket.failure = error
    return CustomLLMError(status_code=error.status, message=str(error))


class ChatHandler(CustomLLM):
    """Chat completions, from the current ticket's answers."""

    async def acompletion(self, *args: Any, model_response: ModelResponse, **kwargs: Any) -> Any:
        """Return the whole completion."""
        ticket = current_request.get()
        choices = MergedChoices(ticket)
        try:
            wholes = await chat_completions.whole_choices(ticket, choices)
        except RequestError as error:
            raise _broken(ticket, error) from None
        model_response.id = f"chatcmpl-{ticket.answer.request_id}"
        model_response.model = ticket.model
        model_response.choices = [
            _choice(ticket, index, whole) for index, whole in enumerate(wholes)
        ]
        model_response.usage = _usage(choices.usage)
        return model_response

    async def astreaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[ModelResponseStream]:
        """Yield the completion as it arrives.

        LiteLLM ends a stream at the first chunk whose first choice has a finish reason, and drops
        what comes with or after it: usage and the other choices' reasons go before.
        """
        ticket = current_request.get()
        choices = MergedChoices(ticket)
        reasons: dict[int, str | None] = {}
        try:
            async with contextlib.aclosing(chat_completions.chunks(ticket, choices)) as pieces:
                async for piece in pieces:
                    if piece.finish_reason is None:
                        yield _chunk(ticket, _streamed(piece))
                    else:
                        reasons[piece.index] = piece.finish_reason
        except RequestError as error:
            raise _broken(ticket, error) from None
        finally:
            choices.close()
        if len(reasons) > 1:
            others = [StreamingChoices(reasons[i], i, Delta()) for i in range(1, len(reasons))]
            yield _chunk(ticket, StreamingChoices(None, 0, Delta()), *others)
        extras = usage_extras.extra_fields(choices.usage)
        last = _chunk(ticket, StreamingChoices(None, 0, Delta("", provider_specific_fields=extras)))
        last.usage = _usage(choices.usage)
        yield last
        yield _chunk(ticket, StreamingChoices(reasons[0], 0, Delta()))


def _choice(
    ticket: AdmittedRequest, index: int, whole: chat_completions.WholeChoice
) -> ModelChoice:
    choice = ModelChoice(
        index=index, finish_reason=whole.finish_reason, message=Message(**whole.message())
    )
    if ticket.request.sampling.top_logprobs is not None:
        choice.logprobs = chat_completions.logprob_fields(whole.logprobs)
    return choice


def _streamed(piece: chat_completions.ChatChunk) -> StreamingChoices:
    extra = {}
    if piece.progress is not None:
        extra = {"provider_specific_fields": {chat_completions.PROGRESS: piece.progress}}
    choice = StreamingChoices(None, piece.index, Delta(**piece.delta, **extra))
    if piece.logprobs:
        choice.logprobs = chat_completions.logprob_fields(piece.logprobs)
    return choice


def _chunk(ticket: AdmittedRequest, *choices: StreamingChoices) -> ModelResponseStream:
    return ModelResponseStream(
        id=f"chatcmpl-{ticket.answer.request_id}", model=ticket.model, choices=list(choices)
    )


def _usage(usage: wire_messages.Usage) -> Usage:
    told = chat_completions.usage_fields(usage)
    made = Usage(
        prompt_tokens=told["prompt_tokens"],
        completion_tokens=told["completion_tokens"],
        total_tokens=told["total_tokens"],
        prompt_tokens_details=PromptTokensDetailsWrapper(**told["prompt_tokens_details"]),
        completion_tokens_details=CompletionTokensDetailsWrapper(
            **told["completion_tokens_details"]
        ),
    )
    for name in usage_extras.EXTRAS:
        setattr(made, name, told[name])  # kept where the answer is not streamed
    return made


class MessagesHandler(MessagesInterceptor):
    """Anthropic Messages, from the current ticket's answer: the events are ours."""

    def can_handle(self, tools: Any, custom_llm_provider: str | None) -> bool:
        return custom_llm_provider == PROVIDER

    async def handle(self, **kwargs: Any) -> Any:
        """Return the whole message, or an iterator of its events' bytes."""
        ticket = current_request.get()
        if ticket.request.stream:
            return messages_events.events(ticket)
        try:
            return await messages_events.whole(ticket)
        except RequestError as error:
            raise _broken(ticket, error) from None


chat_handler: Final = ChatHandler()
messages_handler: Final = MessagesHandler()
