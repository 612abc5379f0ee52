"""Runs the checks of a new model on this machine in idle time, and saves the findings."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from hearth.worker.doctor.findings import Findings, FindingsFile, findings_json
from hearth.worker.doctor.run_checks import CheckRun

IDLE_BEFORE_CHECKS_S: Final = 60.0  # seconds without a request; most tool calls of agents take less
ATTEMPTS_MAX: Final = 3  # runs that the worker did not survive, maybe because of a check

log = logging.getLogger(__name__)


def is_due(found: Findings | None, dtype: str) -> bool:
    """Return whether weights of `dtype` still have to be checked."""
    return (
        found is None
        or found.dtype != dtype
        or (not found.checks and found.attempts < ATTEMPTS_MAX)
    )


class IdleChecks:
    """Runs checks while there is no request, a forward at a time.

    A request drops the check in progress and its memory; the results of other checks stay. The
    findings are saved and used from the next start on, so serving does not change meanwhile.
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
        """Without `file`, nothing is saved. Unless `is_wanted`, the checks wait for `run_again`."""
        self.found = found
        self._make_run = make_run
        self._file = file
        self._is_wanted = is_wanted
        self._clock = clock
        self._idle_from = clock()
        self._run: CheckRun | None = None

    def step(self) -> bool:
        """Run one forward of the checks if it is time; return whether there is more to do now."""
        if not self._is_wanted or self._clock() - self._idle_from < IDLE_BEFORE_CHECKS_S:
            return False
        if self._run is None:
            self._run = self._make_run()
            # If the checks end this process, the next start has to know that they began.
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
        """Drop the check in progress for a request, and wait for the next idle time."""
        self._idle_from = self._clock()
        if self._run is not None:
            self._run.drop()

    def run_again(self) -> None:
        """Let all checks run again without waiting for idle time."""
        self.interrupt()
        self._run, self._is_wanted = None, True
        self._idle_from = self._clock() - IDLE_BEFORE_CHECKS_S  # a user waits for the report

    def report(self) -> dict[str, Any]:
        """Return the state of the checks, and the findings."""
        run = self._run
        state = "running" if run is not None else "waiting" if self._is_wanted else "idle"
        return {
            "state": state,
            "running": run.running if run is not None else "",
            "findings": findings_json(self.found) if self.found is not None else None,
        }

    def take(self, run: CheckRun) -> None:
        """Save the findings of a run that has ended."""
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
