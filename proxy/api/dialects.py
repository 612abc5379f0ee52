"""Lists the client APIs. Each has an `ApiDialect` with all that the server needs to know.

Each API has a folder beside this file, with the modules `parse`, `events` and `errors`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.api.answer_frames import AdmittedRequest, FrameWriter
from hearth.proxy.api.chat_completions import (
    errors as chat_errors,
    events as chat_events,
    parse as chat_parse,
)
from hearth.proxy.api.completions import (
    errors as completions_errors,
    events as completions_events,
    parse as completions_parse,
)
from hearth.proxy.api.messages import (
    errors as messages_errors,
    events as messages_events,
    parse as messages_parse,
)
from hearth.proxy.api.ollama import (
    errors as ollama_errors,
    events as ollama_events,
    parse as ollama_parse,
)
from hearth.proxy.api.responses import (
    errors as responses_errors,
    events as responses_events,
    parse as responses_parse,
)
from hearth.proxy.http.http_exchange import EVENT_STREAM
from hearth.proxy.request.parsed_request import Dialect, LiteLLMDialect, ParsedRequest
from hearth.shared.errors import RequestError


@dataclass(frozen=True, slots=True)
class ApiDialect:
    """One client API."""

    paths: tuple[str, ...]  # paths of its requests
    parse: Callable[[dict[str, Any]], ParsedRequest]  # parses a body; raises RequestError
    whole: Callable[[AdmittedRequest], Awaitable[dict[str, Any]]]  # gives the whole answer as JSON
    writer: Callable[[AdmittedRequest], FrameWriter]  # writes the answer as a stream
    error_body: Callable[[RequestError, str], dict[str, Any]]  # takes the request id too
    error_event: Callable[[RequestError], bytes]  # last event of a relayed stream
    litellm_dialect: LiteLLMDialect  # name in LiteLLM, or another API's name if no cloud serves it
    count_path: str = ""  # path that counts a prompt's tokens; "" = none
    media_type: bytes = EVENT_STREAM  # content type of a stream


def _ollama(path: str, parse: Callable[[dict[str, Any]], ParsedRequest]) -> ApiDialect:
    return ApiDialect(
        (path,),
        parse,
        ollama_events.whole,
        ollama_events.OllamaWriter,
        ollama_errors.error_body,
        ollama_errors.error_event,
        litellm_dialect="chat",
        media_type=ollama_events.MEDIA_TYPE,
    )


DIALECTS: Final[dict[Dialect, ApiDialect]] = {
    "chat": ApiDialect(
        ("/v1/chat/completions", "/chat/completions"),
        chat_parse.parse,
        chat_events.whole,
        chat_events.ChatWriter,
        chat_errors.error_body,
        chat_errors.error_event,
        litellm_dialect="chat",
    ),
    "completions": ApiDialect(
        ("/v1/completions", "/completions"),
        completions_parse.parse,
        completions_events.whole,
        completions_events.CompletionWriter,
        completions_errors.error_body,
        completions_errors.error_event,
        litellm_dialect="completions",
    ),
    "messages": ApiDialect(
        ("/v1/messages",),
        messages_parse.parse,
        messages_events.whole,
        messages_events.MessageWriter,
        messages_errors.error_body,
        messages_errors.error_event,
        litellm_dialect="messages",
        count_path="/v1/messages/count_tokens",
    ),
    "responses": ApiDialect(
        ("/v1/responses", "/responses"),
        responses_parse.parse,
        responses_events.whole,
        responses_events.ResponseWriter,
        responses_errors.error_body,
        responses_errors.error_event,
        litellm_dialect="responses",
        count_path="/v1/responses/input_tokens",
    ),
    "ollama_chat": _ollama("/api/chat", ollama_parse.parse_chat),
    "ollama_generate": _ollama("/api/generate", ollama_parse.parse_generate),
}
ANSWER_PATHS: Final = {path: name for name, api in DIALECTS.items() for path in api.paths}
COUNT_PATHS: Final = {api.count_path: name for name, api in DIALECTS.items() if api.count_path}
