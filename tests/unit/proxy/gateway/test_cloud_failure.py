"""Checks whose mistake a failed cloud call is told to be, by LiteLLM's own errors.

Those that a provider causes are tested at the real server (e2e/gateway/test_fallbacks.py).
"""

import litellm
import orjson
import pytest

from hearth.proxy.gateway.cloud_failure import failure_of

Refused = litellm.BadRequestError


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Refused("temperature is 9", "m", "p"), None),
        (litellm.NotFoundError("no such model", "m", "p"), None),
        (litellm.ContextWindowExceededError("too long", "m", "p"), "context_window"),
        (Refused('{"code": "context_length_exceeded"}', "m", "p"), "context_window"),
        (litellm.ContentPolicyViolationError("no", "m", "p"), "content_policy"),
        (Refused("content_policy_violation", "m", "p"), "content_policy"),
        (Refused("Output blocked by content filtering policy", "m", "p"), "content_policy"),
        (litellm.exceptions.PaymentRequiredError("pay", "p", "m"), "error"),
        (Refused("Your credit balance is too low", "m", "p"), "error"),
        (litellm.AuthenticationError("the operator's key", "p", "m"), "error"),
        (ValueError("a bug"), "error"),
    ],
)
def test_the_class_of_the_error_tells_whose_mistake_it_is(
    error: Exception, cause: str | None
) -> None:
    body = orjson.dumps({"error": {"message": str(error)}})
    assert failure_of(error, getattr(error, "status_code", 500), body).cause == cause


def test_the_text_is_the_message_of_either_dialect_without_advice_and_bounded() -> None:
    for body, text in (
        ({"error": {"message": "m", "code": "400"}}, "m"),
        ({"type": "error", "error": {"type": "api_error", "message": "m"}}, "m"),
        ({"detail": {"error": "m"}}, "m"),
        ({"detail": "m"}, "m"),
        ({"error": "m"}, "m"),
        ([], "no answer came"),
    ):
        assert str(failure_of(None, 500, orjson.dumps(body))) == text
    told = failure_of(ValueError("boom\n\nLiteLLM: model group 'x' failed"), 0, b"")
    assert (str(told), told.status, told.cause) == ("boom", 502, "error")
    assert [failure_of(None, each, b"").cause for each in (422, 503)] == [None, "error"]
