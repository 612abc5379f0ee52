"""Defines what the proxy and LiteLLM's process say to each other; nothing here imports LiteLLM.

They share a socket in the private directory. A connection carries frames: JSON as [what, fields]
is answered by JSON, {"found": ...} or {"error": ...}. After a "call" and its body come a head, the
reply's parts, an empty frame and an end. Who closes the connection ends what it asked.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.gateway.cloud_bodies import CloudDialect
from hearth.proxy.request.encoder_names import EncoderKind
from hearth.proxy.request.parsed_request import LiteLLMDialect
from hearth.shared.wire_messages import Usage

AccountDialect = LiteLLMDialect | EncoderKind  # what a local answer is an answer to

REQUEST_HEADER: Final = "x-hearth-request"  # of a cloud call, to LiteLLM's app only: our request id
# Headers that a key may come in, of which LiteLLM takes the first in its own order.
KEY_HEADERS: Final = (b"x-litellm-api-key", b"authorization", b"api-key", b"x-api-key")
OVER_BUDGET: Final = "crossed budget"  # as RouterErrors has it
LENGTH_BYTES: Final = 4
HELD_BYTES_MAX: Final = 64 * 1024  # of a reply that nobody has read yet, in each process
PATHS: Final[dict[CloudDialect, str]] = {  # of LiteLLM's app
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
    """Return the next frame. Raises: IncompleteReadError: the other side has ended."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return await reader.readexactly(size)


@dataclass(frozen=True, slots=True)
class LocalAnswerLog:
    """One local answer at its end, whatever came of it. Times are seconds since the epoch.

    `body` has what LiteLLM's logs tell of a request; it, `text`, `thinking` and `calls` are empty
    where no callback wants texts.
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
    usage: Usage | None  # None = it broke off before its worker told
    finish_reason: str = "stop"
    text: str = ""
    thinking: str = ""
    calls: Sequence[dict[str, str]] = ()  # {"id", "name", "arguments"}
    error: tuple[int, str] | None = None  # status and text
    session: str = ""
