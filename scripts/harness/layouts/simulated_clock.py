"""Stands in for the clocks of a process: time passes when the owner says so, and at no other time.

All clocks go on together: `time.monotonic`, `time.time`, `time.perf_counter` and what counts the
seconds awake. Files get their times from it too.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from hearth.shared.suspending_clock import STEP_S_MAX, awake_s

DAY_S: Final = 86_400.0
_STEP_S: Final = STEP_S_MAX * 0.9  # a clock that nobody reads for longer counts as suspended


class SimulatedClock:
    """Counts simulated seconds, from the real ones at its start. Owner: the simulating thread."""

    def __init__(self) -> None:
        self._monotonic_at = time.monotonic()
        # A day begins: what is counted by days does not depend on when a simulation is run.
        self._time_at = (time.time() // DAY_S + 1) * DAY_S
        self.elapsed_s = 0.0

    def monotonic(self) -> float:
        return self._monotonic_at + self.elapsed_s

    def time(self) -> float:
        return self._time_at + self.elapsed_s

    def advance(self, seconds: float) -> None:
        """Let time pass, read as often as a process that runs reads it; none where it is less."""
        while seconds > 0:
            step_s = min(seconds, _STEP_S)
            self.elapsed_s += step_s
            seconds -= step_s
            awake_s()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the process read this clock within the block."""
        touch = os.utime

        def utime(path: Any, times: Any = None) -> None:
            touch(path, times or (self.time(), self.time()))

        with (
            mock.patch.multiple(
                time, time=self.time, monotonic=self.monotonic, perf_counter=self.monotonic
            ),
            mock.patch.object(os, "utime", utime),
        ):
            awake_s()
            yield
