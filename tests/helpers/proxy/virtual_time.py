"""Runs coroutines in an event loop whose clock goes on only while nobody has anything to do.

What waits for a time is then in the order of these times, however busy the machine is.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Passes the time that it is told to wait, at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout is not None:
            self.now += max(0.0, timeout)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` gives. It may wait for times and for itself, and for nothing outside."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
