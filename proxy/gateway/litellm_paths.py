"""Names the paths of LiteLLM's app that calls go to."""

from typing import Final

from hearth.proxy.gateway.cloud.cloud_bodies import CloudDialect

PATHS: Final[dict[CloudDialect, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "messages_count": "/v1/messages/count_tokens",
    "responses": "/v1/responses",
    "responses_count": "/v1/responses/input_tokens",
    "embeddings": "/v1/embeddings",
}
