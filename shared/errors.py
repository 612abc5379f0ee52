"""Defines the errors that are not bugs of ours, with texts that say what to do."""

from typing import Final

RETRY_AFTER_S_MAX: Final = 60  # of a longer one the SDKs take no notice: they come back at once


class RequestError(Exception):
    """This request ends, the next one is served. Reaches the client in its own dialect.

    `status` is the HTTP status, `code` a stable word for programs, the text is for people: the
    measured value, the limit and the remedy. `retry_after_s` is told with a 503 or a 429 only.
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
    """The prompt does not fit the context; clients that compact act on this code."""

    REMEDIES: Final = {
        "model": "The model itself takes no more.",
        "setting": "Or raise MAX_KV_SIZE: the model takes more.",
        "memory": "Or make room, since the model takes more: fewer WORKERS, KV_BITS=8, or a higher "
        "MEMORY_LIMIT_MB.",
    }

    def __init__(self, *, tokens: int, tokens_max: int, context_by: str = "setting") -> None:
        """`context_by` is what makes the context no longer, as ModelFacts has it."""
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
    """The worker that held this request died or was not there; nothing is replayed."""

    CODE = "worker_unavailable"

    def __init__(self, text: str) -> None:
        super().__init__(text, status=503, code=self.CODE)


class WireError(Exception):
    """From decode: the peer is wrong, drop the frame. From encode: the request is, refuse it."""


class StartError(Exception):
    """The server cannot start as configured. Its text is one line and says what to change."""


EXIT_CANNOT_START = 78  # EX_CONFIG: a restart with the same settings would fail the same way
EXIT_STUCK = 75  # of a worker that was told to end and whose chunk in flight did not
EXIT_RANK_LOST = 76  # EX_PROTOCOL: a rank of the model is gone, stuck or computed something else
