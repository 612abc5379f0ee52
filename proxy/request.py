"""One request as every dialect understands it, from the edge to the module that answers it.

The edge parses a body once and submits it; the ticket then travels to LiteLLM's handlers in a
context variable, because LiteLLM is handed a placeholder body and never sees the real one.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shared.errors import RequestError
from shared.wire import Delta, Finished, Prompt, Sampling

Dialect = Literal["chat", "messages", "responses"]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request in our own types. `body` is what it sent, for answers that echo it."""

    dialect: Dialect
    model: str  # as the client named it
    prompt: Prompt
    sampling: Sampling
    stream: bool
    body: dict[str, Any]
    include_usage: bool = False  # streamed chat only
    dropped_tools: tuple[str, ...] = field(default=())  # hosted tools, which this server lacks


class Events(Protocol):
    """What a dialect reads an answer from: a worker's, or the warm-up's canned one."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        """Return what comes next, or None when nothing came within `wait_s`.

        Deltas that wait together come as one. After Finished it is not called again.

        Raises:
            RequestError: the request failed; this is its end.
        """
        ...

    def close(self) -> None:
        """The client is gone or served; free the worker if it is still at it. Never blocks."""
        ...


@dataclass(slots=True)
class Ticket:
    """A request that a worker has admitted, on its way through LiteLLM. Owner: its HTTP task."""

    request: ParsedRequest
    model: str  # the public name of what answers
    answer: Events
    failure: RequestError | None = None  # set where the answer broke, for the edge to tell


current_ticket: ContextVar[Ticket] = ContextVar("current_ticket")
