"""A request inside the worker: its client's side, and what has been done for it."""

import time
from dataclasses import dataclass
from typing import Any

from shared.transport import LEASE_S
from shared.wire import Sampling
from worker.stream.output import Output


class Ticket:
    """The client's side of a request: who asked, and whether they still want it.

    Written by the I/O thread only, read by all: each field is one assignment.
    """

    def __init__(self, request_id: str, peer: bytes) -> None:
        self.request_id = request_id
        self.peer = peer
        self.received_at = time.monotonic()
        self.lease_until = self.received_at + LEASE_S
        self.is_cancelled = False

    def renew(self) -> None:
        self.lease_until = time.monotonic() + LEASE_S

    @property
    def is_gone(self) -> bool:
        return self.is_cancelled or time.monotonic() > self.lease_until


@dataclass(slots=True)
class Request:
    """A rendered request. Owner: the inference thread, once the prompt thread handed it over."""

    ticket: Ticket
    ids: list[int]  # the prompt
    cuts: list[int]  # ends of its prefill forwards; the last is len(ids) - 1
    sampling: Sampling
    tokens_max: int  # of the completion
    output: Output
    cache: list[Any] | None = None  # held from admission to the end
    position: int = 0  # prompt tokens in the cache
    completion_tokens: int = 0
    seq: int = 0  # deltas sent
    first_token_at: float | None = None

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def is_prefilled(self) -> bool:
        return self.position == len(self.ids) - 1

    @property
    def left_tokens(self) -> int:
        """Prompt tokens that must still be prefilled."""
        return len(self.ids) - 1 - self.position

    def next_chunk(self) -> list[int]:
        """Return the tokens of the next forward."""
        end = next(cut for cut in self.cuts if cut > self.position)
        return self.ids[self.position : end]
