"""Checks whose mistake a failed cloud call is told to be."""

import orjson
import pytest

from hearth.proxy.gateway.cloud.cloud_failure import TEXT_CHARS_MAX, failure_of


class BadRequestError(Exception):
    """Named as LiteLLM's; a test of the contract holds the real ones to it."""

    status_code = 400


class ContextWindowExceededError(BadRequestError):
    pass


class ContentPolicyViolationError(BadRequestError):
    pass


class PaymentRequiredError(BadRequestError):
    status_code = 402


class NotFoundError(Exception):
    status_code = 404


class AuthenticationError(Exception):
    status_code = 401


class RateLimitError(Exception):
    status_code = 429


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequestError("temperature is 9"), "client"),
        (NotFoundError("no such model"), "client"),
        (ContextWindowExceededError("too long"), "context_window"),
        (BadRequestError('{"code": "context_length_exceeded"}'), "context_window"),
        (ContentPolicyViolationError("no"), "content_policy"),
        (BadRequestError("content_policy_violation"), "content_policy"),
        (PaymentRequiredError("pay"), "error"),
        (BadRequestError("Your credit balance is too low"), "error"),
        (AuthenticationError("the operator's key"), "error"),
        (RateLimitError("slow down"), "error"),
        (TimeoutError("late"), "error"),
        (ValueError("a bug"), "error"),
    ],
)
def test_the_class_of_the_error_tells_whose_mistake_it_is(error: Exception, kind: str) -> None:
    body = orjson.dumps({"error": {"message": str(error)}})
    found = failure_of(error, getattr(error, "status_code", 500), body)
    assert found.kind == kind


def test_the_body_of_an_error_is_looked_at_too() -> None:
    error = BadRequestError("The prompt is 180,008 tokens and this server accepts 131,071.")
    error.body = {"code": "context_length_exceeded"}  # type: ignore[attr-defined]
    assert failure_of(error, 400, b"").kind == "context_window"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "m", "code": "400"}}, "m"),
        ({"type": "error", "error": {"type": "api_error", "message": "m"}}, "m"),
        ({"detail": {"error": "m"}}, "no answer came"),
        ({"detail": "m"}, "m"),
        ({"error": "m"}, "m"),
        ([], "no answer came"),
    ],
)
def test_the_text_is_the_message_of_either_dialect(body: object, text: str) -> None:
    assert failure_of(None, 500, orjson.dumps(body)).text == text


def test_litellms_advice_on_fallbacks_is_left_out_and_the_text_is_bounded() -> None:
    told = failure_of(ValueError("boom\n\nLiteLLM: model group 'x' failed"), 0, b"")
    assert (told.text, told.status, told.kind) == ("boom", 502, "error")
    assert len(failure_of(ValueError("x" * 9_000), 0, b"").text) == TEXT_CHARS_MAX


def test_without_an_error_the_status_tells() -> None:
    assert failure_of(None, 422, b"").kind == "client"
    assert failure_of(None, 503, b"").kind == "error"
