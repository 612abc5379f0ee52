"""Defines the messages between the proxy and LiteLLM's process, without importing LiteLLM.

All connections use one socket in the private directory, and carry frames. A question is JSON
[what, fields]; its answer is JSON {"found": ...} or {"error": ...}. The question "call" is followed
by its body, and answered by a head, the reply's parts, an empty frame and an end. Closing a
connection cancels its question.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.gateway.cloud_bodies import CloudDialect
from hearth.proxy.request.encoder_names import EncoderKind
from hearth.proxy.request.parsed_request import LiteLLMDialect
from hearth.shared.wire_messages import Usage

AccountDialect = LiteLLMDialect | EncoderKind  # dialect or kind of a local answer

REQUEST_HEADER: Final = "x-hearth-request"  # carries our request id to LiteLLM's app only
# Headers that may carry a key, in any order; LiteLLM's order decides which key counts.
KEY_HEADERS: Final = (b"x-litellm-api-key", b"authorization", b"api-key", b"x-api-key")
OVER_BUDGET: Final = "crossed budget"  # from LiteLLM's RouterErrors
LENGTH_BYTES: Final = 4
HELD_BYTES_MAX: Final = 64 * 1024  # unread bytes of a reply, in each process
PATHS: Final[dict[CloudDialect, str]] = {  # paths of LiteLLM's app
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "messages_count": "/v1/messages/count_tokens",
    "responses": "/v1/responses",
    "responses_count": "/v1/responses/input_tokens",
    "embeddings": "/v1/embeddings",
}


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame. Raises: IncompleteReadError: the other side has closed."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return await reader.readexactly(size)


@dataclass(frozen=True, slots=True)
class LocalAnswerLog:
    """One local answer at its end, complete or failed. Times are seconds since the epoch.

    `body` has the request's fields that LiteLLM logs. `body`, `text`, `thinking` and `calls` are
    empty if no callback uses texts.
    """

    request_id: str
    deployment_id: str  # LiteLLM's model_info.id
    group: str  # the model_name that the request meant
    model: str  # the public name of the local model, as in hearth/NAME
    dialect: AccountDialect
    body: Mapping[str, Any]
    stream: bool
    asked_at: float
    first_token_at: float | None
    ended_at: float
    usage: Usage | None  # None = the answer broke off before its usage came
    finish_reason: str = "stop"
    text: str = ""
    thinking: str = ""
    calls: Sequence[dict[str, str]] = ()  # {"id", "name", "arguments"}
    error: tuple[int, str] | None = None  # a failure's status and text
    session: str = ""
