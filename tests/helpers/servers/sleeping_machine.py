"""Runs a real proxy or a real worker on a machine whose sleep is played on a signal.

SIGUSR1 is a Mac's sleep of 8 hours: the time of day and uvloop's clock go on, `time.monotonic`
stands still. SIGUSR2 is one in which all clocks go on, as where a virtual machine is paused.
While the file SLOW_WHILE exists each chunk and token of the worker takes SLOW_S longer, and no file
of KV is written to its end, so that a sleep comes amid all of them.
"""

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any, Final, TypeVarTuple

import uvloop

SLEPT_S: Final = 8 * 3600.0
SLOW_S: Final = 0.08
SIGNALS: Final = {"mac": signal.SIGUSR1, "all clocks": signal.SIGUSR2}
THIS: Final = "tests.helpers.servers.sleeping_machine"

UVLOOP: Final = uvloop.Loop  # whatever takes its name later

_Ts = TypeVarTuple("_Ts")


class SleepingUvloop(uvloop.Loop):
    """uvloop on a Mac: at its wake `time` has gone on, and every timer that came due fires."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._timers: set[_EarlyTimer] = set()

    def time(self) -> float:
        return self._uvloop_s()

    def _uvloop_s(self) -> float:
        return UVLOOP.time(self) + self._ahead_s

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> Any:
        timer = _EarlyTimer(self, lambda: callback(*args), self._uvloop_s() + delay)
        timer.inner = super().call_later(delay, timer.fire, context=context)
        self._timers.add(timer)
        return timer

    def sleep(self, slept_s: float = SLEPT_S) -> None:
        """Have been asleep for so long."""
        self._ahead_s += slept_s
        for timer in list(self._timers):
            if timer.due_at <= self._uvloop_s():
                self.call_soon(timer.fire)

    def forget(self, timer: "_EarlyTimer") -> None:
        self._timers.discard(timer)


class _EarlyTimer:
    """A timer of uvloop's that a sleep may fire. It fires once."""

    inner: Any

    def __init__(self, loop: SleepingUvloop, act: Callable[[], Any], due_at: float) -> None:
        self._loop, self._act, self.due_at = loop, act, due_at
        self._is_over = False

    def fire(self) -> None:
        if not self._is_over:
            self.cancel()
            self._act()

    def cancel(self) -> None:
        self._is_over = True
        self.inner.cancel()
        self._loop.forget(self)

    def cancelled(self) -> bool:
        return self._is_over

    def when(self) -> float:
        return self.due_at


def play_sleep_on_signals() -> None:
    """Patch the clocks of this process; before anything of Hearth's is imported."""
    ahead_s, monotonic, now = {"monotonic": 0.0, "time": 0.0}, time.monotonic, time.time
    vars(time)["monotonic"] = lambda: monotonic() + ahead_s["monotonic"]
    vars(time)["time"] = lambda: now() + ahead_s["time"]
    vars(uvloop).update(Loop=SleepingUvloop)

    def sleep(number: int, _frame: Any) -> None:
        ahead_s["time"] += SLEPT_S
        ahead_s["monotonic"] += SLEPT_S * (number == SIGNALS["all clocks"])
        loop = asyncio._get_running_loop()
        if isinstance(loop, SleepingUvloop):
            loop.sleep()

    for number in SIGNALS.values():
        signal.signal(number, sleep)


def is_slow() -> bool:
    return Path(os.environ["SLOW_WHILE"]).exists()


def slowed(act: Callable[..., Any], *, is_held: bool) -> Callable[..., Any]:
    """Return `act`, which comes later while it is slow; where it is held, not before the end."""

    @functools.wraps(act)
    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(SLOW_S * is_slow())
        while is_held and is_slow():
            time.sleep(SLOW_S)
        return act(*args, **more)

    return slow


def worker_main() -> int:
    from hearth.worker import main as worker
    from hearth.worker.disk.file_store import FileStore
    from hearth.worker.engine.decode.decoder import Decoder
    from hearth.worker.engine.engine import Engine

    for kind, name in ((Engine, "prefill"), (Decoder, "step"), (FileStore, "put")):
        setattr(kind, name, slowed(getattr(kind, name), is_held=kind is FileStore))
    return worker.main()


def proxy_main() -> int:
    from hearth.proxy.main import main

    return main([sys.executable, "-m", THIS])


if __name__ == "__main__":
    play_sleep_on_signals()
    code = worker_main() if "--worker-id" in sys.argv else proxy_main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
