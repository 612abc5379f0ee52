"""Which worker gets a request."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from proxy.request import ParsedRequest


class Candidate(Protocol):
    """What routing may know about a worker."""

    worker_id: int

    @property
    def load(self) -> int:
        """Requests that it holds, running or waiting."""
        ...


C = TypeVar("C", bound=Candidate)


def choose(candidates: Iterable[C], request: ParsedRequest) -> C | None:
    """Return the least loaded candidate, the lowest id among equals; None where there is none."""
    return min(candidates, key=lambda row: (row.load, row.worker_id), default=None)
