"""Defines the errors that are no bugs of Hearth; their texts name the remedy."""

from typing import Final

RETRY_AFTER_S_MAX: Final = 60  # the SDKs ignore a longer Retry-After and retry at once


class RequestError(Exception):
    """Ends one request; the server goes on. The client gets it in its own dialect.

    `status` is the HTTP status and `code` a stable word for programs. The text is for people and
    names the measured value, the limit and the remedy. `retry_after_s` goes with 503 and 429 only.
    """

    def __init__(
        self,
        text: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class PromptTooLong(RequestError):
    """The prompt does not fit the context; clients compact their conversation on this code."""

    REMEDIES: Final = {
        "model": "The model itself takes no more.",
        "setting": "Or raise MAX_KV_SIZE: the model takes more.",
        "memory": "Or make room, since the model takes more: fewer WORKERS, KV_BITS=8, or a higher "
        "MEMORY_LIMIT_MB.",
    }

    def __init__(self, *, tokens: int, tokens_max: int, context_by: str = "setting") -> None:
        """`context_by` names the limit of the context: a key of REMEDIES, as in ModelFacts."""
        super().__init__(
            f"The prompt is {tokens:,} tokens and this server accepts {tokens_max:,}. "
            f"Remove at least {tokens - tokens_max:,} tokens. {self.REMEDIES[context_by]}",
            code="context_length_exceeded",
            param="messages",
        )


class Overloaded(RequestError):
    """The queue is full; the same request may succeed in a few seconds."""

    CODE = "overloaded"
    RETRY_AFTER_S = 5

    def __init__(self, text: str) -> None:
        super().__init__(text, status=503, code=self.CODE)


class WorkerLost(RequestError):
    """The worker of this request died or was not there; the request is not replayed."""

    CODE = "worker_unavailable"

    def __init__(self, text: str) -> None:
        super().__init__(text, status=503, code=self.CODE)


class WireError(Exception):
    """A message is invalid: `decode` drops the peer's frame, `encode` refuses the request."""


class StartError(Exception):
    """The server cannot start as configured. The text is one line and says what to change."""


EXIT_CANNOT_START = 78  # EX_CONFIG: a restart with the same settings would fail the same way
EXIT_STUCK = 75  # the chunk in flight of a stopping worker did not end
EXIT_RANK_LOST = 76  # EX_PROTOCOL: a rank of the model is gone, stuck or computed something else
