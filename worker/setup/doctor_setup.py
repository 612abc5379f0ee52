"""Makes the checks of a loaded model, and resolves `auto` settings from earlier findings."""

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

ROOM_SHARE: Final = 0.5  # share of free memory for idle checks; the rest stays for requests

log = logging.getLogger(__name__)


def findings_file(settings: Settings, identity: WeightsIdentity) -> FindingsFile | None:
    """Return the file of a checkpoint's findings; None if nothing is written to disk."""
    if settings.max_kv_size_gb == 0:
        return None
    return FindingsFile(settings.kv_cache_dir, subject_of(identity))


def is_float16_good(settings: Settings, identity: WeightsIdentity) -> bool | None:
    """Return whether the checks found float16 good enough; None if they have not run."""
    file = findings_file(settings, identity) if settings.doctor != "off" else None
    findings = file.load() if file is not None else None
    return findings.float16 if findings is not None else None


def with_findings(settings: Settings, findings: Findings | None, dtype: str) -> Settings:
    """Return the settings with `auto` resolved from findings about weights of `dtype`.

    Findings only make reuse stricter. An architecture with a known weakness keeps the strict
    default even if the short conversation of a check does not reveal the weakness.
    """
    if findings is None or settings.doctor == "off" or findings.dtype != dtype:
        return settings
    resolved: dict[str, Any] = {}
    if settings.cache_exact == "auto" and findings.exact:
        resolved["cache_exact"] = "true"
    if not settings.prefill_chunk and findings.chunk:
        resolved["prefill_chunk"] = findings.chunk
    return dataclasses.replace(settings, **resolved)


def check_run(
    loaded: LoadedModel,
    settings: Settings,
    rule: CutRule,
    room: Callable[[], int],
) -> CheckRun:
    """Return a run of all checks; `room` returns the bytes that the checks may take."""
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
    """Return the bytes that kept KV and a forward of the deepest check leave free.

    Return 0 while the system is short of memory.
    """
    if system_pressure() is not Pressure.NORMAL:
        return 0
    return max(0, memory.limit() - memory.used() - memory.forward(DEPTH_MAX))


class ModelDoctor:
    """Holds the findings about a loaded model, and makes and runs the checks.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings, loaded: LoadedModel, starts_itself: bool) -> None:
        """`starts_itself` is false if another worker checks the same model."""
        self._configured = settings
        self._loaded = loaded
        self._dtype = dtype_of(loaded.model) or "unknown"
        self._file = findings_file(settings, loaded.identity)
        self._found = self._file.load() if self._file is not None else None
        # The other ranks do not take part in the forwards of checks.
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
        """Findings from before this start, for weights of this dtype; None = no findings."""
        is_of_these = self._found is not None and self._found.dtype == self._dtype
        return self._found if is_of_these and self._configured.doctor != "off" else None

    def checks(self, rule: CutRule, memory: MemoryGuard) -> IdleChecks:
        """Make and return the checks that run in idle time. Called once."""

        def make_run() -> CheckRun:
            return check_run(
                self._loaded,
                self.settings,
                rule,
                lambda: int(free_bytes(memory) * ROOM_SHARE),
            )

        is_wanted = (
            self._starts_itself and self._file is not None and is_due(self._found, self._dtype)
        )
        self._checks = IdleChecks(make_run, self._file, self._found, is_wanted)
        return self._checks

    def answer(self, what: str) -> dict[str, Any]:
        """Return the report; "check_again" runs the checks again."""
        assert self._checks is not None, "a ready worker has no checks"
        if what == "check_again" and not self._is_off:
            self._checks.run_again()
        off = {"off": self._why_off} if self._is_off else {}
        return self.report(self._checks.report() | off, self._checks.found)

    def check_now(
        self, rule: CutRule, memory: MemoryGuard, report_check: Callable[[str], None]
    ) -> dict[str, Any]:
        """Run all checks, reporting each check's name; keep and return the findings."""
        run = check_run(self._loaded, self.settings, rule, lambda: free_bytes(memory))
        name = ""
        while run.step():
            if run.running not in ("", name):
                name = run.running
                report_check(name)
        checks = IdleChecks(lambda: run, self._file, self._found, False)
        checks.take(run)
        return self.report(checks.report(), checks.found)

    def report(self, state: dict[str, Any], findings: Findings | None) -> dict[str, Any]:
        """Return the report on this machine and model, without names of people or paths."""
        return {
            "machine": machine_facts(),
            "model": model_facts(self._loaded, self._dtype),
            "settings": settings_row(self._configured),
            "auto": [
                {"setting": name, "now": now, "next_start": later}
                for name, now, later in self._auto_rows(findings)
            ],
            **state,
        }

    def _auto_rows(self, findings: Findings | None) -> list[tuple[str, str, str]]:
        """Return (setting, value now, value after a restart) for each setting that is `auto`."""
        later = with_findings(self._configured, findings, self._dtype)
        rows, starts = [], (self.settings, later)
        if self._configured.cache_exact == "auto":
            now, then = (str(is_exact(self._loaded, start)).lower() for start in starts)
            rows.append(("CACHE_EXACT", now, then))
        if not self._configured.prefill_chunk:
            own = prefill_lengths(self._loaded).chunk
            now, then = (str(start.prefill_chunk or own) for start in starts)
            rows.append(("PREFILL_CHUNK", now, then))
        if (
            self._configured.dtype == "auto"
            and findings is not None
            and findings.float16 is not None
        ):
            later_dtype = "float16" if findings.float16 else self._dtype
            rows.append(("DTYPE", self._dtype, later_dtype))
        return rows


def settings_row(settings: Settings) -> dict[str, Any]:
    """Return the settings that matter to the checks, without names, paths and keys."""
    names = (
        "cache_exact",
        "prefill_chunk",
        "dtype",
        "doctor",
        "kv_bits",
        "cache_store_bits",
        "workers",
        "live_slots_max",
        "max_concurrent_requests",
        "max_kv_size",
        "memory_limit_mb",
        "cache_ram_budget_mb",
        "max_kv_size_gb",
        "kv_disk_write_gb_per_day",
    )
    return {name.upper(): getattr(settings, name) for name in names}


# A second draft branch is worth its rows if a forward of ROWS_MAX rows costs at most so many
# forwards of one row (docs/measuring.md).
TREE_COST_MAX: Final = 1.5


def draft_policy(
    settings: Settings, findings: Findings | None, engine: Engine, *, is_exact: bool, is_cpu: bool
) -> DraftPolicy:
    """Return the policy of drafts; `findings` are the doctor's findings about model and machine.

    Only the model's caches are checked here; the first draft tries whether the model can verify.

    A CPU only serves to try and to test Hearth, so findings and measured times are not used
    there.
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
    elif mode == "auto" and not is_cpu and (reason := _why_not(settings, findings)):
        reach = "none"
    curve = row_costs(None if is_cpu else findings)
    return DraftPolicy(mode, reach, "all", reason, curve, engine.decoder.takes_trees)


def row_costs(findings: Findings | None) -> Mapping[int, float]:
    """Return a forward's cost by its rows, relative to one row; more rows never cost less."""
    if findings is None or findings.row_costs is None:
        return CPU_CURVE
    costs, most = {}, 1.0
    for rows, cost in sorted(findings.row_costs.items()):
        costs[rows] = most = max(most, cost)
    return costs


def are_trees_cheap(findings: Findings | None, *, is_cpu: bool) -> bool:
    """Return whether drafts with branches may be worth their rows' cost."""
    costs = row_costs(None if is_cpu else findings)
    return costs.get(ROWS_MAX, TREE_COST_MAX + 1) <= TREE_COST_MAX


def _why_not(settings: Settings, findings: Findings | None) -> str:
    """Return why `auto` drafts nothing; "" if there are drafts."""
    if findings is None or findings.drafts_alike is None or findings.row_costs is None:
        when = "DOCTOR=off" if settings.doctor == "off" else "it does when idle"
        return f"hearth doctor has not checked this model on this machine: {when}"
    if not findings.drafts_alike:
        return "hearth doctor found that several tokens in one forward give others than one by one"
    return ""
