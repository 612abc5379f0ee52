"""Runs the checks of a fixture, as small as they can be."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hearth.worker.doctor.check_context import CheckContext, CheckRules
from hearth.worker.doctor.checked_machine import subject_of
from hearth.worker.doctor.findings import CheckResult
from hearth.worker.doctor.run_checks import CHECKS, CheckRun
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.prompt.prefill_cuts import CutRule
from scripts.harness.socketless_worker import loaded, marks

CHUNK = 64
DEPTH = 150  # tokens of the canary's last prompt
ANSWER_TOKENS = 3
ROOM_BYTES = 1 << 30


def context_of(
    name: str,
    fixture: tuple[Any, ...] = (),
    model: Callable[[Any], Any] = lambda model: model,
    directory: Path | None = None,
    **rules: Any,
) -> CheckContext:
    """Return the context of the checks; `fixture` is the type, `model` wraps the model."""
    plain = loaded(name, *fixture)
    wrapped: LoadedModel = dataclasses.replace(plain, model=model(plain.model))
    small = {"depth_max": DEPTH, "answer_tokens": ANSWER_TOKENS}
    small |= {"ssd_bytes": 32 << 20}
    return CheckContext(
        loaded=wrapped,
        engine=Engine(wrapped),
        rule=CutRule(CHUNK, marks(name)),
        rules=CheckRules(default_chunk=CHUNK, ssd_directory=directory, **(small | rules)),
        room=lambda: ROOM_BYTES,
    )


def run_of(context: CheckContext, *names: str) -> CheckRun:
    """Return a run of the checks that tell `names`; of all without names."""
    checks = tuple(check for check in CHECKS if not names or {*names} & {*check[1]})
    return CheckRun(context, subject_of(context.loaded.identity), checks)


def checked(context: CheckContext, *names: str) -> dict[str, CheckResult]:
    """Run the checks to their end; return what each told."""
    run = run_of(context, *names)
    while run.step():
        pass
    return {check.name: check for check in run.findings().checks}
