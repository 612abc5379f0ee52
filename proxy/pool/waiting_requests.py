"""Holds requests that no worker can take yet, until one can or their time is up.

A worker may be starting, or has to load another model first.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from hearth.shared.errors import Overloaded, RequestError, WorkerLost
from hearth.shared.suspending_clock import awake_s

READY_WAIT_S_MAX: Final = 1.0  # for a worker that starts unasked; clients come back by themselves
WAITING_MAX: Final = 256  # each holds its body; more are told to come back
LOADING: Final = "The model is still loading; try again in a few seconds."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request that waits for a model."""

    model: str
    since: float  # by `awake_s`


class ModelHost(Protocol):
    """Gives models to workers. Owner: the event loop; nothing here blocks."""

    def wanted(self) -> None:
        """A request waits for a model: it is among the `requests`."""

    def wait_s(self, model: str) -> float:
        """Return how long a request may wait for `model`; 0 = in vain."""

    def why_nobody(self, model: str) -> RequestError:
        """Return what is told to a request that has waited that long."""

    def why_missing(self) -> str:
        """Return why no worker can load the default model now; "" = one can, or has it."""

    def unload(self, model: str, key: str) -> None:
        """Have `model`, "" = the default one, unloaded once it is idle, unless it is asked for.

        `key` is the digest of who wishes so; what another has used of late stays.
        """


class NullModelHost:
    """Workers keep the model that they start with."""

    def wanted(self) -> None:
        """Nothing is done for it."""

    def wait_s(self, model: str) -> float:
        return READY_WAIT_S_MAX

    def why_nobody(self, model: str) -> RequestError:
        return Overloaded(LOADING)

    def why_missing(self) -> str:
        return ""

    def unload(self, model: str, key: str) -> None:
        """It stays."""


class WaitingRequests:
    """Holds each request until a worker takes it, as long as the host says. Owner: the event loop.

    Invariant: `requests` has one row for each request that waits, at most WAITING_MAX.
    """

    def __init__(self) -> None:
        self.host: ModelHost = NullModelHost()
        self.requests: list[ModelRequest] = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """Have everyone look again."""
        self._changed.set()

    def close(self) -> None:
        """This server stops: nobody waits any longer."""
        self._is_closed = True
        self.wake()

    async def wait_for_worker(self, request: ModelRequest, find: Callable[[], T | None]) -> T:
        """Return what `find` gives, as soon as it gives something.

        Raises:
            RequestError: nothing was found in time, or too many wait already.
        """
        if len(self.requests) >= WAITING_MAX and find() is None:
            raise Overloaded(
                f"{len(self.requests)} requests wait for a worker and this server holds "
                f"{WAITING_MAX}. Try again in a few seconds."
            )
        began = awake_s()
        self.requests.append(request)
        try:
            while not self._is_closed:
                found = find()
                if found is not None:
                    return found
                self.host.wanted()
                wait_s = began + self.host.wait_s(request.model) - awake_s()
                if wait_s <= 0:
                    break
                assert len(self.requests) <= WAITING_MAX, len(self.requests)
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
        finally:
            self.requests.remove(request)
        if self._is_closed:
            raise WorkerLost("The server is shutting down.")
        raise self.host.why_nobody(request.model)
