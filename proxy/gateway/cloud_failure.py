"""Decides whose mistake a failed cloud call is, by the class of LiteLLM's error.

Classes are compared by name, so that this module does not import LiteLLM.
"""

from typing import Any, Final

import orjson

from hearth.proxy.gateway.routing_table import Cause
from hearth.shared.errors import RETRY_AFTER_S_MAX, RequestError

STATUS_UNKNOWN: Final = 502
UNPROCESSABLE: Final = 422
CAUSES_MAX: Final = 50  # causes followed in a chain, which LiteLLM may close to a ring
SWALLOWED: Final = (
    "The model's server refuses this request as unprocessable (422), and LiteLLM does not tell why "
    "while drop_params is set: with drop_params: false in litellm_settings it does."
)
REDIRECT: Final = (
    "The model's server answers with a redirect, which is not followed: prompts and keys go only "
    "to addresses that LITELLM_CONFIG names. Set api_base to the address that serves this model."
)
_CODES: Final[dict[Cause | None, str]] = {
    "context_window": "context_length_exceeded",
    "content_policy": "content_policy_violation",
}
_CLIENT_CLASSES: Final = {
    *("BadRequestError", "NotFoundError", "UnprocessableEntityError", "ProxyException"),
    "HTTPException",
}
_CLIENT_STATUSES: Final = (400, 401, 403, 404, 413, 415, 422)
# Mistakes in the operator's account or config, although these classes are BadRequestErrors.
_OPERATOR_CLASSES: Final = {"PaymentRequiredError", "LiteLLMUnknownProvider", "BudgetExceededError"}
_OPERATOR_TEXTS: Final = ("credit balance is too low", "insufficient_quota")
_ADVICE: Final = "\n\nLiteLLM: "  # beginning of advice on fallbacks, which the gateway handles
# Signs of too long a prompt, for which LiteLLM does not look.
_TOO_LONG: Final = ("context_length_exceeded", "prompt is too long")
# LiteLLM refuses to inline the references of a schema: see litellm_server.
_SCHEMA: Final = "unpack_defs: inlined schema exceeded"
# LiteLLM swallowed a refusal and got no stream.
_NO_STREAM: Final = "'NoneType' object has no attribute '__aiter__'"
_POLICY: Final = ("content_policy_violation", "content filtering policy")


class CloudError(RequestError):
    """A cloud model's server refused or failed, or its answer broke off."""

    def __init__(
        self, text: str, *, cause: Cause | None, status: int, retry_after_s: int | None = None
    ) -> None:
        """`cause` selects the list of fallbacks; None = the client's own mistake."""
        code = _CODES.get(cause, "cloud_error")
        super().__init__(text, status=status, code=code, retry_after_s=retry_after_s)
        self.cause = cause


def failure_of(
    error: BaseException | None, status: int, body: bytes, retry_after: str = ""
) -> CloudError:
    """Return the failure that follows from the hook's `error` and from the app's reply.

    The failure's text may hold secrets. `status` is 0 if the app began no reply; `retry_after` is
    the reply's header.
    """
    if is_redirect(error):
        return CloudError(REDIRECT, cause="error", status=STATUS_UNKNOWN)
    text = _message_in(body) or (str(error) if error is not None else "") or "no answer came"
    text = text.split(_ADVICE)[0]
    if _NO_STREAM in text:
        error, text, status = None, SWALLOWED, UNPROCESSABLE
    code = 400 if _SCHEMA in text else status or _status_of(error)
    wait_s = _retry_after_s(error, retry_after)
    return CloudError(text, cause=_cause(error, code, text), status=code, retry_after_s=wait_s)


def is_redirect(error: BaseException | None) -> bool:
    """Return whether `error` was caused by a redirect that an HTTP client refused."""
    for _ in range(CAUSES_MAX):
        if error is None:
            break
        if type(error).__name__ == "TooManyRedirects":
            return True
        error = error.__cause__ or error.__context__
    return False


def _cause(error: BaseException | None, status: int, text: str) -> Cause | None:
    names = {base.__name__ for base in type(error).__mro__} - {"NoneType", "object"}
    if "ContextWindowExceededError" in names:
        return "context_window"
    if "ContentPolicyViolationError" in names:
        return "content_policy"
    texts = f"{text} {error} {getattr(error, 'body', '')}"
    if _SCHEMA in texts:
        return None
    is_clients = status in _CLIENT_STATUSES and (not names or bool(names & _CLIENT_CLASSES))
    is_operators = names & _OPERATOR_CLASSES or any(sign in texts for sign in _OPERATOR_TEXTS)
    if is_operators or not is_clients:
        return "error"
    if any(sign in texts for sign in _TOO_LONG):
        return "context_window"
    return "content_policy" if any(sign in texts for sign in _POLICY) else None


def _status_of(error: BaseException | None) -> int:
    found = getattr(error, "status_code", getattr(error, "status", None))
    return found if isinstance(found, int) and 400 <= found <= 599 else STATUS_UNKNOWN


def _retry_after_s(error: BaseException | None, header: str) -> int | None:
    """Return the cloud's Retry-After: from LiteLLM's error, the response, or the app's `header`."""
    kept = getattr(error, "litellm_response_headers", None) or {}
    sent = getattr(getattr(error, "response", None), "headers", None) or {}
    values = (str(item.get("retry-after", "")) for item in (kept, sent, {"retry-after": header}))
    found = next(filter(str.isdecimal, values), None)
    return None if found is None else min(RETRY_AFTER_S_MAX, int(found[:9]))


def _message_in(body: bytes) -> str:
    """Return the message of an error's JSON, OpenAI's or Anthropic's; "" if there is none."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    for key in ("detail", "error", "message"):
        found = found.get(key, found) if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""
