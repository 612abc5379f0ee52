"""The system's memory pressure: kept KV goes first, then prompts wait, at last they are refused."""

import ctypes
import sys
from typing import Any

import pytest

from hearth.worker.engine.system_state import Pressure, system_pressure
from hearth.worker.schedule import memory_guard
from hearth.worker.schedule.memory_guard import PressureRelief
from scripts.harness.socketless_worker import machine

MB = 1 << 20


class Holder:
    """Holds `kept` bytes of KV, and `live` ones in idle live caches."""

    def __init__(self, kept: int, live: int = 0) -> None:
        self.kept, self.live = kept, live

    def releasable(self, spared: Any = None) -> int:
        return self.kept + self.live

    def release(self, nbytes: int, spared: Any = None, reason: Any = None) -> None:
        gone = min(nbytes, self.kept)
        self.kept -= gone
        self.live -= nbytes - gone
        assert self.live >= 0, "more is asked back than there is"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def relief_of(holder: Holder, levels: list[Pressure], clock: Clock) -> PressureRelief:
    return PressureRelief(holder, lambda: holder.kept, lambda: levels[-1], clock)


def test_a_warning_takes_kept_kv_bit_by_bit_and_no_live_cache() -> None:
    holder, clock = Holder(1024 * MB, 300 * MB), Clock()
    levels = [Pressure.NORMAL]
    relief = relief_of(holder, levels, clock)
    relief.step()
    assert holder.kept == 1024 * MB
    levels.append(Pressure.WARNING)
    relief.step()
    assert holder.kept == 1024 * MB, "it looks once a second"
    clock.now = 1.0
    relief.step()
    assert holder.kept == 896 * MB and not relief.holds_back()
    for second in range(2, 40):
        clock.now = float(second)
        relief.step()
    assert (holder.kept, holder.live) == (0, 300 * MB)
    assert relief.shed_bytes == 1024 * MB
    assert relief.report()["level"] == "warning" and relief.report()["severity"] == 1


def test_at_critical_live_caches_go_too_and_prompts_wait() -> None:
    holder, clock = Holder(64 * MB, 64 * MB), Clock()
    relief = relief_of(holder, [Pressure.CRITICAL], clock)
    for second in range(5):
        clock.now = float(second)
        relief.step()
    assert (holder.kept, holder.live) == (0, 0) and relief.sheds == 2
    assert relief.holds_back()


def test_a_prompt_that_waited_in_vain_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_guard, "WAIT_S_MAX", -1.0)
    relief = PressureRelief()
    waits = machine("qwen3", tiny=True, relief=relief)
    relief.level = Pressure.CRITICAL
    answer = waits.submit([7, 8, 9] * 30)
    (failed,) = waits.step()
    assert failed.request_id == answer.request.request_id and waits.scheduler.is_idle
    assert (failed.status, failed.code) == (503, "memory_pressure")  # type: ignore[union-attr]
    assert waits.scheduler.counts["pressure_refusals"] == 1


@pytest.mark.parametrize(
    ("told", "failed", "level"),
    [(1, 0, 1), (2, 0, 2), (4, 0, 4), (3, 0, 1), (4, -1, 1)],
)
def test_macos_tells_its_level(
    told: int, failed: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def sysctlbyname(self, name: bytes, value: Any, size: Any, new: Any, length: int) -> int:
            assert name == b"kern.memorystatus_vm_pressure_level"
            ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = told
            return failed

    assert system_pressure() is Pressure.NORMAL
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    assert system_pressure() == level
