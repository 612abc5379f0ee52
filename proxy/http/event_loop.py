"""Makes the event loop's timers count only the time in which the machine is awake.

uvloop's own timers go on while a Mac sleeps. When the Mac wakes, every wait would end at once, in
uvicorn and aiohttp too, and each waiting request would be refused.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Final, TypeVarTuple

import uvloop

from hearth.shared.suspending_clock import awake_s

AGAIN_S_MIN: Final = 0.001  # uvloop counts in milliseconds

_Ts = TypeVarTuple("_Ts")


class SuspendingEventLoop(uvloop.Loop):
    """Runs uvloop on the clock of `suspending_clock`. Owner: the thread that runs it."""

    def time(self) -> float:
        return awake_s()

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(awake_s() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return _Timer(self, when, lambda: callback(*args), context)

    def start_timer(
        self, delay_s: float, callback: Callable[[], object], context: Context | None
    ) -> asyncio.TimerHandle:
        """Have uvloop call `callback` after `delay_s`; earlier if the machine sleeps."""
        return super().call_later(delay_s, callback, context=context)


class _Timer(asyncio.TimerHandle):
    """Calls back once, when the loop's clock reaches `when`. Owner: the event loop."""

    def __init__(
        self,
        loop: SuspendingEventLoop,
        when: float,
        callback: Callable[[], object],
        context: Context | None,
    ) -> None:
        super().__init__(when, callback, (), loop, context)
        self._owner = loop
        self._asked = context
        self._act: Callable[[], object] | None = callback
        self._timer = loop.start_timer(max(0.0, when - awake_s()), self._fire, context)

    def _fire(self) -> None:
        left_s = self.when() - awake_s()
        if left_s > 0:
            wait_s = max(left_s, AGAIN_S_MIN)
            self._timer = self._owner.start_timer(wait_s, self._fire, self._asked)
        elif self._act is not None:
            act, self._act = self._act, None
            act()

    def cancel(self) -> None:
        self._timer.cancel()
        self._act = None
        asyncio.Handle.cancel(self)  # TimerHandle.cancel calls a method that uvloop lacks
