"""The three places where LiteLLM calls us: chat completions, Anthropic Messages, keys.

Each takes the request from the ticket that the edge made; what LiteLLM itself passes is the relay's
placeholder. This module imports LiteLLM, so only proxy.litellm_front may cause its import.
"""

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
    Choices,
    CompletionTokensDetailsWrapper,
    Delta,
    Message,
    ModelResponse,
    ModelResponseStream,
    PromptTokensDetailsWrapper,
    StreamingChoices,
    Usage,
)

from proxy.dialects import chat, messages
from proxy.request import Ticket, current_ticket
from shared import wire
from shared.errors import RequestError

PROVIDER: Final = "hearth"
edge_token: Final = "sk-" + secrets.token_hex(32)  # new at each start; known to the edge alone


async def authorise(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Accept what came through the edge, which has checked the client's own key."""
    if not hmac.compare_digest(api_key.encode(), edge_token.encode()):
        raise HTTPException(401, "not through the edge")
    return UserAPIKeyAuth(api_key=edge_token)


def _broken(ticket: Ticket, error: RequestError) -> CustomLLMError:
    """Note why the answer broke off, where the relay finds it, and return what LiteLLM is told."""
    ticket.failure = error
    return CustomLLMError(status_code=error.status, message=str(error))


class ChatHandler(CustomLLM):
    """Chat completions, from the current ticket's answer."""

    async def acompletion(self, *args: Any, model_response: ModelResponse, **kwargs: Any) -> Any:
        """Return the whole completion."""
        ticket = current_ticket.get()
        texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        logprobs: list[wire.TokenLogprob] = []
        try:
            while not isinstance(row := await ticket.answer.next_event(), wire.Finished):
                if row is not None:
                    texts.setdefault(row.channel, []).append(row.text)
                    logprobs += row.logprobs
        except RequestError as error:
            raise _broken(ticket, error) from None
        message = Message(
            role="assistant",
            content="".join(texts["content"]),
            reasoning_content="".join(texts["reasoning"]) or None,
        )
        choice = Choices(index=0, finish_reason=row.reason, message=message)
        if ticket.request.sampling.top_logprobs is not None:
            choice.logprobs = chat.logprob_fields(logprobs)
        model_response.id = f"chatcmpl-{ticket.answer.request_id}"
        model_response.model = ticket.model
        model_response.choices = [choice]
        model_response.usage = _usage(row.usage)
        return model_response

    async def astreaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[ModelResponseStream]:
        """Yield the completion as it arrives.

        Usage goes before the finish chunk: LiteLLM drops what comes with or after it.
        """
        ticket = current_ticket.get()
        yield _chunk(ticket, role="assistant", content="")
        try:
            while not isinstance(row := await ticket.answer.next_event(), wire.Finished):
                if row is not None:
                    yield _delta_chunk(ticket, row)
        except RequestError as error:
            raise _broken(ticket, error) from None
        finally:
            ticket.answer.close()
        fields = {"kv_cache": chat.kv_cache_fields(row.usage)}
        last = _chunk(ticket, content="", provider_specific_fields=fields)
        last.usage = _usage(row.usage)
        yield last
        yield _chunk(ticket, finish_reason=row.reason)


def _delta_chunk(ticket: Ticket, row: wire.Delta) -> ModelResponseStream:
    name = "reasoning_content" if row.channel == "reasoning" else "content"
    chunk = _chunk(ticket, **{name: row.text})
    if row.logprobs:
        chunk.choices[0].logprobs = chat.logprob_fields(row.logprobs)
    return chunk


def _chunk(
    ticket: Ticket, *, finish_reason: str | None = None, **delta: Any
) -> ModelResponseStream:
    choice = StreamingChoices(index=0, delta=Delta(**delta), finish_reason=finish_reason)
    return ModelResponseStream(
        id=f"chatcmpl-{ticket.answer.request_id}", model=ticket.model, choices=[choice]
    )


def _usage(usage: wire.Usage) -> Usage:
    told = chat.usage_fields(usage)
    made = Usage(
        prompt_tokens=told["prompt_tokens"],
        completion_tokens=told["completion_tokens"],
        total_tokens=told["total_tokens"],
        prompt_tokens_details=PromptTokensDetailsWrapper(**told["prompt_tokens_details"]),
        completion_tokens_details=CompletionTokensDetailsWrapper(
            **told["completion_tokens_details"]
        ),
    )
    made.kv_cache = told["kv_cache"]  # kept where the answer is not streamed
    return made


class MessagesHandler(MessagesInterceptor):
    """Anthropic Messages, from the current ticket's answer: the events are ours."""

    def can_handle(self, tools: Any, custom_llm_provider: str | None) -> bool:
        return custom_llm_provider == PROVIDER

    async def handle(self, **kwargs: Any) -> Any:
        """Return the whole message, or an iterator of its events' bytes."""
        ticket = current_ticket.get()
        if ticket.request.stream:
            return messages.events(ticket)
        try:
            return await messages.whole(ticket)
        except RequestError as error:
            raise _broken(ticket, error) from None


chat_handler: Final = ChatHandler()
messages_handler: Final = MessagesHandler()
