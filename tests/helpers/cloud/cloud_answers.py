"""Defines what a mock cloud is told to answer, and the errors that a real cloud answers with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

# Where an answer breaks off or stays: before its head, behind the head, or amid its text.
Place = Literal["before the head", "behind the head", "amid the text"]
Dialect = Literal["chat", "completions", "responses", "messages", "embeddings"]


@dataclass(frozen=True)
class CloudCall:
    """One call of a tool that the model writes."""

    name: str
    arguments: Mapping[str, Any]
    is_custom: bool = False  # a tool of Responses that takes a text, `arguments["input"]`


@dataclass(frozen=True)
class CloudError:
    """An error in the shape of either provider."""

    status: int
    message: str
    kind: str = "invalid_request_error"  # OpenAI's `type`
    code: str | None = None
    param: str | None = None
    anthropic_kind: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)


class RefusedBodyError(Exception):
    """A body that the real service would not take."""

    def __init__(self, error: CloudError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True)
class CloudAnswer:
    """What the mock says to one request."""

    text: str = "Hello from the cloud."
    thinking: str = ""
    redacted: str = ""  # thinking that Anthropic shows to nobody
    calls: tuple[CloudCall, ...] = ()
    finish: Literal["", "length", "content_filter"] = ""  # "": as the answer is
    shows_thinking: bool = False  # in `reasoning_content` of chat, as many servers but OpenAI do
    error: CloudError | None = None
    error_place: Place = "before the head"
    drops: Place | None = None  # the connection is closed there
    hangs: Place | None = None  # nothing comes from there on, until the client leaves
    first_s: float = 0.0  # waited before the head
    piece_s: float = 0.0  # waited before each event


HELLO: Final = CloudAnswer()

# ---------------------------------------------------------------- errors in their real words

INVALID: Final = CloudError(400, "Invalid value for 'temperature': must be at most 2.")
CONTEXT_LENGTH: Final = CloudError(
    400,
    "This model's maximum context length is 128000 tokens. However, your messages resulted in "
    "200123 tokens. Please reduce the length of the messages.",
    code="context_length_exceeded",
    param="messages",
)
PROMPT_TOO_LONG: Final = CloudError(400, "prompt is too long: 200123 tokens > 200000 maximum")
CONTENT_POLICY: Final = CloudError(
    400,
    "Your request was rejected as a result of our safety system. Your prompt may contain text "
    "that is not allowed by our safety system.",
    code="content_policy_violation",
)
FORBIDDEN: Final = CloudError(
    403,
    "You are not allowed to sample from this model",
    anthropic_kind="permission_error",
)
TOO_LARGE: Final = CloudError(
    413, "Request exceeds the maximum size", anthropic_kind="request_too_large"
)
RATE_LIMIT: Final = CloudError(
    429,
    "Rate limit reached for requests per min (RPM): Limit 3, Used 3. Please try again in 20s.",
    kind="requests",
    code="rate_limit_exceeded",
    anthropic_kind="rate_limit_error",
    headers={"retry-after": "20"},
)
SERVER_ERROR: Final = CloudError(
    500,
    "The server had an error while processing your request. Sorry about that!",
    kind="server_error",
    anthropic_kind="api_error",
)
OVERLOADED: Final = CloudError(
    529, "Overloaded", kind="server_error", anthropic_kind="overloaded_error"
)


def wrong_key(key: str) -> CloudError:
    """Return what is said to a wrong key, which is repeated, as OpenAI does in part."""
    text = f"Incorrect API key provided: {key}. You can find your API key at https://example.com."
    return CloudError(401, text, code="invalid_api_key", anthropic_kind="authentication_error")


def no_model(name: str) -> CloudError:
    text = f"The model `{name}` does not exist or you do not have access to it."
    return CloudError(404, text, code="model_not_found", anthropic_kind="not_found_error")


def invalid(message: str, param: str | None = None, code: str | None = None) -> RefusedBodyError:
    return RefusedBodyError(CloudError(400, message, param=param, code=code))


def error_body(dialect: Dialect, error: CloudError) -> dict[str, Any]:
    """Return the body of `error` as the provider of `dialect` writes it."""
    if dialect == "messages":
        told = {"type": error.anthropic_kind, "message": error.message}
        return {"type": "error", "error": told, "request_id": "req_mock"}
    kept = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": kept}
