"""Makes the checks of a loaded model, and sets what is `auto` by what they found before."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from hearth.shared.settings import Settings
from hearth.worker.doctor.check_context import DEPTH_MAX, CheckContext, CheckRules
from hearth.worker.doctor.checked_machine import machine_facts, model_facts, subject_of
from hearth.worker.doctor.findings import Findings, FindingsFile
from hearth.worker.doctor.idle_checks import IdleChecks, is_due
from hearth.worker.doctor.run_checks import CheckRun
from hearth.worker.draft.draft_length import CPU_CURVE, ROWS_MAX
from hearth.worker.engine.compute_dtype import dtype_of
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.mlx_memory import GB
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.prefill_lengths import prefill_lengths
from hearth.worker.engine.system_state import Pressure, system_pressure
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.kv.layer_adapters import can_rewind
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.schedule.answer_drafts import CANNOT_VERIFY, DraftPolicy, Reach
from hearth.worker.schedule.memory_guard import MemoryGuard
from hearth.worker.setup.kv_setup import is_exact

ROOM_SHARE: Final = 0.5  # of what is free: a request that comes amid a check finds the rest

log = logging.getLogger(__name__)


def findings_file(settings: Settings, identity: WeightsIdentity) -> FindingsFile | None:
    """Return where what is found of a checkpoint is kept; None where nothing is written."""
    if settings.max_kv_size_gb == 0:
        return None
    return FindingsFile(settings.kv_cache_dir, subject_of(identity))


def is_float16_good(settings: Settings, identity: WeightsIdentity) -> bool | None:
    """Return what the checks of a checkpoint found of float16; None before they did."""
    file = findings_file(settings, identity) if settings.doctor != "off" else None
    found = file.load() if file is not None else None
    return found.float16 if found is not None else None


def with_findings(settings: Settings, found: Findings | None, dtype: str) -> Settings:
    """Return the settings in which what is `auto` is what was found of weights of `dtype`.

    Findings only make reuse stricter: what an architecture is known to do stays so where a short
    conversation did not show it.
    """
    if found is None or settings.doctor == "off" or found.dtype != dtype:
        return settings
    meant: dict[str, Any] = {}
    if settings.cache_exact == "auto" and found.exact:
        meant["cache_exact"] = "true"
    if not settings.prefill_chunk and found.chunk:
        meant["prefill_chunk"] = found.chunk
    return dataclasses.replace(settings, **meant)


def check_run(
    loaded: LoadedModel,
    settings: Settings,
    rule: CutRule,
    room: Callable[[], int],
) -> CheckRun:
    """Return a run of all checks, which may take the bytes that `room` tells."""
    context = CheckContext(
        loaded=loaded,
        engine=Engine(loaded),
        rule=rule,
        rules=CheckRules(
            default_chunk=prefill_lengths(loaded).chunk,
            ssd_directory=settings.kv_cache_dir if settings.max_kv_size_gb != 0 else None,
            ssd_bytes_per_day=settings.kv_disk_write_gb_per_day * GB,
        ),
        room=room,
    )
    return CheckRun(context, subject_of(loaded.identity))


def free_bytes(memory: MemoryGuard) -> int:
    """Return what is free beside what is kept, and beside a forward of the deepest check.

    Nothing is, while the system is short of memory.
    """
    if system_pressure() is not Pressure.NORMAL:
        return 0
    return max(0, memory.limit() - memory.used() - memory.forward(DEPTH_MAX))


class ModelDoctor:
    """The findings about one loaded model, and the checks that make them. Reads one file.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings, loaded: LoadedModel, starts_itself: bool) -> None:
        """`starts_itself` is false in a worker beside another that checks the same model."""
        self._asked = settings
        self._loaded = loaded
        self._dtype = dtype_of(loaded.model) or "unknown"
        self._file = findings_file(settings, loaded.identity)
        self._found = self._file.load() if self._file is not None else None
        # Each forward of a check would have to be told to the other ranks.
        self._why_off = f"RANKS is {settings.ranks}: see hearth ranks check"
        self._is_off = settings.ranks > 1
        self._starts_itself = starts_itself and settings.doctor == "auto" and not self._is_off
        self.settings = with_findings(settings, self._found, self._dtype)
        self._checks: IdleChecks | None = None
        for name, now, _ in self._auto_rows(self._found):
            if self.settings != settings:
                log.info("%s is %s by what was found on this machine (hearth doctor)", name, now)

    @property
    def found(self) -> Findings | None:
        """What was found before this start, of weights of this type; None = nothing."""
        is_of_these = self._found is not None and self._found.dtype == self._dtype
        return self._found if is_of_these and self._asked.doctor != "off" else None

    def checks(self, rule: CutRule, memory: MemoryGuard) -> IdleChecks:
        """Return the checks, to be run in idle time; make them once."""

        def make_run() -> CheckRun:
            return check_run(
                *(self._loaded, self.settings, rule),
                lambda: int(free_bytes(memory) * ROOM_SHARE),
            )

        is_wanted = (
            self._starts_itself and self._file is not None and is_due(self._found, self._dtype)
        )
        self._checks = IdleChecks(make_run, self._file, self._found, is_wanted)
        return self._checks

    def answer(self, what: str) -> dict[str, Any]:
        """Return the report; "check_again" has the checks run again."""
        assert self._checks is not None, "a worker that is ready has them"
        if what == "check_again" and not self._is_off:
            self._checks.run_again()
        off = {"off": self._why_off} if self._is_off else {}
        return self.report(self._checks.report() | off, self._checks.found)

    def check_now(
        self, rule: CutRule, memory: MemoryGuard, tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """Run all checks, telling each one's name; keep and return what they found."""
        run = check_run(self._loaded, self.settings, rule, lambda: free_bytes(memory))
        name = ""
        while run.step():
            if run.running not in ("", name):
                name = run.running
                tell(name)
        checks = IdleChecks(lambda: run, self._file, self._found, False)
        checks.take(run)
        return self.report(checks.report(), checks.found)

    def report(self, state: dict[str, Any], found: Findings | None) -> dict[str, Any]:
        """Return all that is told of this machine and model, without a name or a path."""
        return {
            "machine": machine_facts(),
            "model": model_facts(self._loaded, self._dtype),
            "settings": settings_row(self._asked),
            "auto": [
                {"setting": name, "now": now, "next_start": later}
                for name, now, later in self._auto_rows(found)
            ],
            **state,
        }

    def _auto_rows(self, found: Findings | None) -> list[tuple[str, str, str]]:
        """Return, for each setting that is `auto`, what it means now and after a restart."""
        later = with_findings(self._asked, found, self._dtype)
        rows, starts = [], (self.settings, later)
        if self._asked.cache_exact == "auto":
            now, then = (str(is_exact(self._loaded, each)).lower() for each in starts)
            rows.append(("CACHE_EXACT", now, then))
        if not self._asked.prefill_chunk:
            own = prefill_lengths(self._loaded).chunk
            now, then = (str(each.prefill_chunk or own) for each in starts)
            rows.append(("PREFILL_CHUNK", now, then))
        if self._asked.dtype == "auto" and found is not None and found.float16 is not None:
            later_dtype = "float16" if found.float16 else self._dtype
            rows.append(("DTYPE", self._dtype, later_dtype))
        return rows


def settings_row(settings: Settings) -> dict[str, Any]:
    """Return the settings that matter to the checks: none names a person, a place or a key."""
    names = (
        *("cache_exact", "prefill_chunk", "dtype", "doctor", "kv_bits", "cache_store_bits"),
        "workers",
        *(
            "live_slots_max",
            "max_concurrent_requests",
            "max_kv_size",
            "memory_limit_mb",
            "cache_ram_budget_mb",
        ),
        *("max_kv_size_gb", "kv_disk_write_gb_per_day"),
    )
    return {name.upper(): getattr(settings, name) for name in names}


# Where a forward of ROWS_MAX rows costs more than that, in forwards of one, a second branch is not
# worth its rows (docs/measuring.md).
TREE_COST_MAX: Final = 1.5


def draft_policy(
    settings: Settings, found: Findings | None, engine: Engine, *, is_exact: bool, is_cpu: bool
) -> DraftPolicy:
    """Return what is drafted; `found` are the doctor's findings about this model and machine.

    Whether the model can verify is tried when something first is: here its caches are asked.

    On a CPU, which is there to try Hearth out and to test it, nothing needs to be found, and no
    measured time decides anything.
    """
    mode = settings.speculate
    if settings.ranks > 1:
        return DraftPolicy(mode, reason=f"RANKS is {settings.ranks}: nothing is drafted over ranks")
    if is_exact:
        return DraftPolicy(mode, reason="exact mode: a draft may change an answer's last bits")
    if not can_rewind(engine.new_cache()):
        return DraftPolicy(mode, reason=CANNOT_VERIFY)
    reach: Reach = "all"
    reason = ""
    if mode == "off":
        reach, reason = "none", "SPECULATE=off"
    elif mode == "forced":
        reach = "forced"
    elif mode == "auto" and not is_cpu and (reason := _why_not(settings, found)):
        reach = "none"
    curve = row_costs(None if is_cpu else found)
    return DraftPolicy(mode, reach, "all", reason, curve, engine.decoder.takes_trees)


def row_costs(found: Findings | None) -> Mapping[int, float]:
    """Return what a forward of so many rows costs, in forwards of one: more rows never less."""
    if found is None or found.row_costs is None:
        return CPU_CURVE
    costs, most = {}, 1.0
    for rows, cost in sorted(found.row_costs.items()):
        costs[rows] = most = max(most, cost)
    return costs


def are_trees_cheap(found: Findings | None, *, is_cpu: bool) -> bool:
    """Return whether drafts with branches could be worth their rows."""
    costs = row_costs(None if is_cpu else found)
    return costs.get(ROWS_MAX, TREE_COST_MAX + 1) <= TREE_COST_MAX


def _why_not(settings: Settings, found: Findings | None) -> str:
    """Return why `auto` drafts nothing; "" where it does."""
    if found is None or found.drafts_alike is None or found.row_costs is None:
        when = "DOCTOR=off" if settings.doctor == "off" else "it does when idle"
        return f"hearth doctor has not checked this model on this machine: {when}"
    if not found.drafts_alike:
        return "hearth doctor found that several tokens in one forward give others than one by one"
    return ""
