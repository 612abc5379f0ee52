"""Runs all checks a forward at a time, within a time limit, and makes findings of the results."""

import time
from collections.abc import Callable
from typing import Final

import mlx.core as mx

from hearth.shared.paths import without_home
from hearth.worker.doctor.check_answers import (
    BATCHES,
    COLD,
    DEFAULT,
    DRAFTS,
    EXACT,
    RESTORES,
    REWINDS,
    check_batches,
    check_cold,
    check_default,
    check_drafts,
    check_exact,
    costs_in,
)
from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.check_float16 import NAME as FLOAT16, check_float16
from hearth.worker.doctor.findings import CheckResult, Findings, Subject
from hearth.worker.doctor.measure_speed import (
    CHUNK,
    SPEED,
    SSD,
    TABLES,
    measure_chunk,
    measure_speed,
    measure_ssd,
    measure_tables,
)

Check = Callable[[CheckContext], Steps]

# The checks in order, the most important first, and the results that each check reports.
CHECKS: Final[tuple[tuple[Check, tuple[str, ...]], ...]] = (
    (measure_speed, (SPEED,)),
    (check_cold, (COLD,)),
    (check_exact, (EXACT, REWINDS, RESTORES)),
    (check_default, (DEFAULT,)),
    (check_batches, (BATCHES,)),
    (check_drafts, (DRAFTS,)),
    (check_float16, (FLOAT16,)),
    (measure_chunk, (CHUNK,)),
    (measure_tables, (TABLES,)),
    (measure_ssd, (SSD,)),
)
REASON_CHARS_MAX: Final = 300


class CheckRun:
    """One run of all checks. `step` runs one forward; `drop` drops the check in progress.

    A dropped check begins again; the results of other checks stay.
    Owner: the inference thread.
    """

    def __init__(
        self,
        context: CheckContext,
        subject: Subject,
        checks: tuple[tuple[Check, tuple[str, ...]], ...] = CHECKS,
    ) -> None:
        self.context = context
        self.subject = subject
        self._checks = checks
        self._number = 0
        self._steps: Steps | None = None
        self._began_s = 0.0  # spent seconds when the check in progress began

    @property
    def is_done(self) -> bool:
        return self._number == len(self._checks)

    @property
    def running(self) -> str:
        """The name of the check in progress, "" without one."""
        return self.context.stage if self._steps is not None else ""

    def step(self) -> bool:
        """Run one forward of the checks; return whether there is more to do."""
        if self.is_done:
            return False
        context, (check, names) = self.context, self._checks[self._number]
        if self._steps is None:
            self._steps, self._began_s = check(context), context.spent_s
            context.begin_stage(names[0])
        began = context.clock()
        try:
            if context.left_s <= 0:
                raise LeftOut(f"the {context.rules.seconds_max:g} s of all checks were spent")
            with context.engine.stream():
                next(self._steps)
        except StopIteration:
            self._end(names, f"{context.stage} ended before")
        except LeftOut as why:
            self._end(names, str(why))
        except Exception as error:  # a fault of the device, a library or Hearth is a finding
            text = error.strerror if isinstance(error, OSError) else str(error)
            # The text becomes one line without the paths of the user's files.
            text = " ".join(without_home(text or "").split())[:REASON_CHARS_MAX]
            context.report("fault", {}, f"the check broke: {type(error).__name__} {text}".strip())
            self._end(names, f"{context.stage} broke")
        finally:
            context.spent_s += context.clock() - began
        return not self.is_done

    def drop(self) -> None:
        """Drop the check in progress and its memory; its time is not counted."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
            self.context.spent_s = self._began_s
            mx.clear_cache()

    def findings(self) -> Findings:
        """Return the findings so far."""
        context, names = self.context, [name for _, names in self._checks for name in names]
        found = {name: context.results[name] for name in names if name in context.results}
        figures = {name: result.figures for name, result in found.items()}
        chunk, default = (figures.get(CHUNK, {}).get(key) for key in ("best", "default"))
        float16 = figures.get(FLOAT16, {}).get(FLOAT16)  # only some devices need float16
        drafts_differ = _differs(found, DRAFTS)
        return Findings(
            subject=self.subject,
            dtype=context.dtype,
            checks=tuple(found.values()),
            exact=_differs(found, DEFAULT),
            chunk=chunk if isinstance(chunk, int) and chunk != default else None,
            float16=float16 if isinstance(float16, bool) else None,
            row_costs=costs_in(figures.get(DRAFTS, {})) or None,
            drafts_alike=None if drafts_differ is None else not drafts_differ,
            made_at=time.time(),
        )

    def _end(self, names: tuple[str, ...], why: str) -> None:
        """Go on to the next check; results that this check did not report are left out."""
        for name in names:
            if name not in self.context.results:
                self.context.results[name] = CheckResult(name, "left out", reason=why)
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._number += 1
        mx.clear_cache()


def _differs(found: dict[str, CheckResult], name: str) -> bool | None:
    """Return whether the two answers of a check had different tokens; None if unknown."""
    result = found.get(name)
    if result is None or result.verdict not in ("ok", "differs"):
        return None
    return result.verdict == "differs"
