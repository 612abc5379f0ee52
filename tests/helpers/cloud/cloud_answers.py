"""Defines what a mock cloud is told to answer, and remembers what it gave out."""

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

BYTES_PER_TOKEN: Final = 4
# Where an answer breaks off or stays: before its head, behind the head, or amid its text.
Place = Literal["before the head", "behind the head", "amid the text"]
Row = dict[str, Any]


# ---------------------------------------------------------------- what a test has it say


@dataclass(frozen=True)
class CloudError:
    """An error in the shape of either provider."""

    status: int
    message: str
    code: str | None = None
    kind: str = "invalid_request_error"  # Anthropic's `type`
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, dialect: str) -> Row:
        if dialect == "messages":
            told = {"type": self.kind, "message": self.message}
            return {"type": "error", "error": told, "request_id": "req_mock"}
        return {"error": {"message": self.message, "type": self.kind, "code": self.code}}


@dataclass(frozen=True)
class CloudCall:
    """One call of a tool that the model writes."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CloudAnswer:
    """What the mock says to one request."""

    text: str = "Hello from the cloud."
    thinking: str = ""
    redacted: str = ""  # thinking that Anthropic shows to nobody
    calls: tuple[CloudCall, ...] = ()
    error: CloudError | None = None
    error_place: Place = "before the head"
    drops: Place | None = None  # the connection is closed there
    hangs: Place | None = None  # nothing comes from there on, until the client leaves


HELLO: Final = CloudAnswer()
INVALID: Final = CloudError(400, "Invalid value for 'temperature': must be at most 2.")
CONTEXT_LENGTH: Final = CloudError(
    400,
    "This model's maximum context length is 128000 tokens. However, your messages resulted in "
    "200123 tokens. Please reduce the length of the messages.",
    "context_length_exceeded",
)
PROMPT_TOO_LONG: Final = CloudError(400, "prompt is too long: 200123 tokens > 200000 maximum")
CONTENT_POLICY: Final = CloudError(
    400,
    "Your request was rejected as a result of our safety system. Your prompt may contain text "
    "that is not allowed by our safety system.",
    "content_policy_violation",
)
FORBIDDEN: Final = CloudError(
    403, "You are not allowed to sample from this model", None, "permission_error"
)
RATE_LIMIT: Final = CloudError(
    429,
    "Rate limit reached for requests per min (RPM): Limit 3, Used 3. Please try again in 20s.",
    "rate_limit_exceeded",
    "rate_limit_error",
    {"retry-after": "20"},
)
SERVER_ERROR: Final = CloudError(
    500,
    "The server had an error while processing your request. Sorry about that!",
    None,
    "api_error",
)
OVERLOADED: Final = CloudError(529, "Overloaded", None, "overloaded_error")


def no_model(name: str) -> CloudError:
    text = f"The model `{name}` does not exist or you do not have access to it."
    return CloudError(404, text, "model_not_found", "not_found_error")


# ---------------------------------------------------------------- what it remembers


@dataclass(frozen=True)
class CloudUsage:
    """The tokens of one answer."""

    prompt: int
    cached: int
    completion: int


@dataclass
class CloudMemory:
    """What one account has been given. Owner: the mock's event loop."""

    key: bytes = field(default_factory=lambda: os.urandom(32))
    items: dict[str, tuple[bool, str | None]] = field(default_factory=dict)  # is stored; needs
    responses: dict[str, list[Row]] = field(default_factory=dict)  # input and output
    prefixes: set[bytes] = field(default_factory=set)

    def sealed(self, text: str) -> str:
        """Return `text` in a shell that only this account opens, and only unchanged."""
        mac = hmac.digest(self.key, text.encode(), "sha256")
        return base64.b64encode(mac + text.encode()).decode()

    def opened(self, blob: object) -> str | None:
        """Return what `sealed` was given, or None for a foreign or changed blob."""
        try:
            raw = base64.b64decode(str(blob), validate=True)
        except ValueError:
            return None
        expected = hmac.digest(self.key, raw[32:], "sha256")
        return raw[32:].decode() if hmac.compare_digest(raw[:32], expected) else None

    def usage(self, model: str, units: Iterable[Any], answer: CloudAnswer) -> CloudUsage:
        """Count a request of `units` (tools, system, each message) and remember its prefixes.

        The cached tokens are those of the longest beginning that `model` has read before.
        """
        digest = hashlib.sha256(model.encode())
        prompt = cached = 0
        for unit in units:
            text = json.dumps(without(unit, {"cache_control"}), sort_keys=True)  # no part of it
            digest.update(text.encode() + b"\n")
            is_known = cached == prompt and digest.digest() in self.prefixes
            prompt += tokens(text)
            cached = prompt if is_known else cached
            self.prefixes.add(digest.digest())
        written = answer.text + "".join(json.dumps(dict(call.arguments)) for call in answer.calls)
        return CloudUsage(prompt, cached, tokens(written) + tokens(answer.thinking))


def tokens(text: str) -> int:
    return 1 + len(text.encode()) // BYTES_PER_TOKEN


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def without(value: Any, names: Set[str]) -> Any:
    """Return `value` without fields that are null or have one of these names, at any depth."""
    if isinstance(value, dict):
        kept = ((k, each) for k, each in value.items() if k not in names and each is not None)
        return {k: without(each, names) for k, each in kept}
    return [without(each, names) for each in value] if isinstance(value, list) else value
