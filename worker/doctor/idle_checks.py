"""Runs the checks of a new model on this machine in idle time, and keeps what they find."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from hearth.worker.doctor.findings import Findings, FindingsFile, as_row
from hearth.worker.doctor.run_checks import CheckRun

IDLE_BEFORE_CHECKS_S: Final = 60.0  # without a request: an agent's tool is at work less long
ATTEMPTS_MAX: Final = 3  # runs in which the worker ended: a check may be what ends it

log = logging.getLogger(__name__)


def is_due(found: Findings | None, dtype: str) -> bool:
    """Whether checks of weights of `dtype` are still to be run."""
    return (
        found is None
        or found.dtype != dtype
        or (not found.checks and found.attempts < ATTEMPTS_MAX)
    )


class IdleChecks:
    """Runs checks while no request is there, a forward at a time.

    A request drops the check in progress, its memory too; the others' results stay. What is found
    is saved, and read at the next start: nothing that serves requests changes by it.
    Owner: the inference thread.
    """

    def __init__(
        self,
        make_run: Callable[[], CheckRun],
        file: FindingsFile | None,
        found: Findings | None,
        is_wanted: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file` None keeps nothing. `is_wanted` False waits for `ask_again`."""
        self.found = found
        self._make_run = make_run
        self._file = file
        self._is_wanted = is_wanted
        self._clock = clock
        self._idle_from = clock()
        self._run: CheckRun | None = None

    def step(self) -> bool:
        """With nothing else to do, do a forward's work; say whether there is more at once."""
        if not self._is_wanted or self._clock() - self._idle_from < IDLE_BEFORE_CHECKS_S:
            return False
        if self._run is None:
            self._run = self._make_run()
            # The next start is to know that checks began, should they end this process.
            if self.found is None or not self.found.checks:
                attempts = self.found.attempts if self.found is not None else 0
                began = self._run.findings()
                self._save(dataclasses.replace(began, checks=(), attempts=attempts + 1))
            log.info("checking this model on this machine, as no request is there (DOCTOR=auto)")
        if self._run.step():
            return True
        self.take(self._run)
        return False

    def interrupt(self) -> None:
        """A request is there: give up the check in progress, and wait for the next idle time."""
        self._idle_from = self._clock()
        if self._run is not None:
            self._run.drop()

    def ask_again(self) -> None:
        """Have all checks run again, from the first one on."""
        self.interrupt()
        self._run, self._is_wanted = None, True
        self._idle_from = self._clock() - IDLE_BEFORE_CHECKS_S  # somebody waits for it

    def report(self) -> dict[str, Any]:
        """Return what was found, and what is still to be."""
        run = self._run
        state = "running" if run is not None else "waiting" if self._is_wanted else "idle"
        return {
            "state": state,
            "running": run.running if run is not None else "",
            "findings": as_row(self.found) if self.found is not None else None,
        }

    def take(self, run: CheckRun) -> None:
        """Keep what a run that is over has found."""
        found = run.findings()
        if found.float16 is None and self.found is not None:
            found = dataclasses.replace(found, float16=self.found.float16)
        self._run, self._is_wanted = None, False
        self._save(found)
        faults = ", ".join(check.name for check in found.faults)
        if faults:
            log.warning("the checks found faults (%s); hearth doctor tells them", faults)
        else:
            log.info("the checks found no fault; hearth doctor tells what auto means now")

    def _save(self, found: Findings) -> None:
        self.found = found
        if self._file is None:
            return
        try:
            self._file.save(found)
        except OSError as error:
            log.warning("what the checks found cannot be kept: %s", error)
