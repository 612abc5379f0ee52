"""Tells what a failed call to a cloud means: whose mistake it is, by the class of LiteLLM's error.

The classes are known by their names, so that nothing here imports LiteLLM.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from hearth.shared.errors import RETRY_AFTER_S_MAX

FailureKind = Literal["context_window", "content_policy", "client", "error"]

TEXT_CHARS_MAX: Final = 2_000
STATUS_UNKNOWN: Final = 502
_CLIENT_CLASSES: Final = {
    *("BadRequestError", "NotFoundError", "UnprocessableEntityError", "ProxyException"),
    "HTTPException",
}
_CLIENT_STATUSES: Final = (400, 401, 403, 404, 413, 415, 422)
# Of the operator's account or config, although they are kinds of BadRequestError.
_OPERATOR_CLASSES: Final = {"PaymentRequiredError", "LiteLLMUnknownProvider", "BudgetExceededError"}
_OPERATOR_TEXTS: Final = ("credit balance is too low", "insufficient_quota")
_ADVICE: Final = "\n\nLiteLLM: "  # on fallbacks, of which it does not know
# A code, and Anthropic's words from elsewhere, that LiteLLM does not look for.
_TOO_LONG: Final = ("context_length_exceeded", "prompt is too long")
# LiteLLM refuses to put a schema's references in their places: see litellm_server.
_SCHEMA: Final = "unpack_defs: inlined schema exceeded"
_POLICY: Final = ("content_policy_violation", "content filtering policy")


@dataclass(frozen=True, slots=True)
class CloudFailure:
    """Why a cloud's answer is none, or broke off."""

    kind: FailureKind
    status: int
    text: str  # without secrets
    retry_after_s: int | None = None  # as the cloud said it, in whole seconds


def failure_of(
    error: BaseException | None, status: int, body: bytes, retry_after: str = ""
) -> CloudFailure:
    """Return what `error`, noted by the hook, and the app's own reply mean; secrets are in it.

    `status` is 0 where the app began no reply; `retry_after` is what that has for its header.
    """
    told = _message_in(body) or (str(error) if error is not None else "") or "no answer came"
    told = told.split(_ADVICE)[0]
    code = 400 if _SCHEMA in told else status or _status_of(error)
    wait_s = _retry_after_s(error, retry_after)
    return CloudFailure(_kind(error, code, told), code, told, wait_s)


def _kind(error: BaseException | None, status: int, told: str) -> FailureKind:
    names = {row.__name__ for row in type(error).__mro__} - {"NoneType", "object"}
    if "ContextWindowExceededError" in names:
        return "context_window"
    if "ContentPolicyViolationError" in names:
        return "content_policy"
    texts = f"{told} {error} {getattr(error, 'body', '')}"
    if _SCHEMA in texts:
        return "client"
    if names & _OPERATOR_CLASSES or any(row in texts for row in _OPERATOR_TEXTS):
        return "error"
    is_clients = status in _CLIENT_STATUSES and (not names or bool(names & _CLIENT_CLASSES))
    if is_clients and any(row in texts for row in _TOO_LONG):
        return "context_window"
    if is_clients and any(row in texts for row in _POLICY):
        return "content_policy"
    return "client" if is_clients else "error"


def _status_of(error: BaseException | None) -> int:
    found = getattr(error, "status_code", getattr(error, "status", None))
    return found if isinstance(found, int) and 400 <= found <= 599 else STATUS_UNKNOWN


def _retry_after_s(error: BaseException | None, told: str) -> int | None:
    """Return the cloud's Retry-After: LiteLLM keeps it with its error, and may not send it on."""
    kept = getattr(error, "litellm_response_headers", None) or {}
    sent = getattr(getattr(error, "response", None), "headers", None) or {}
    values = (str(row.get("retry-after", "")) for row in (kept, sent, {"retry-after": told}))
    found = next(filter(str.isdecimal, values), None)
    return None if found is None else min(RETRY_AFTER_S_MAX, int(found[:9]))


def _message_in(body: bytes) -> str:
    """Return the message of an error's JSON in either dialect; "" where there is none."""
    try:
        row: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    for key in ("detail", "error", "message"):
        row = row.get(key, row) if isinstance(row, dict) else row
    return row if isinstance(row, str) else ""
