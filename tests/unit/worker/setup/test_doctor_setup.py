"""Tests for worker/setup/doctor_setup.py: what is auto means what was found, at the next start."""

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hearth.shared.settings import Settings, load_settings
from hearth.worker.doctor.checked_machine import subject_of
from hearth.worker.doctor.findings import CheckResult, Findings
from hearth.worker.doctor.measure_speed import best_chunk
from hearth.worker.engine.compute_dtype import device_architecture
from hearth.worker.engine.model_loader import backend
from hearth.worker.engine.prefill_lengths import lengths_for
from hearth.worker.engine.system_state import Pressure
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.schedule.memory_guard import MemoryGuard
from hearth.worker.setup import doctor_setup
from hearth.worker.setup.doctor_setup import ModelDoctor, free_bytes, with_findings
from hearth.worker.setup.kv_setup import cut_rule_of, is_exact
from scripts.harness.socketless_worker import loaded, marks

MODEL = loaded("qwen3")
FOUND = Findings(
    subject_of(MODEL.identity),
    "float32",
    (CheckResult("default", "differs"),),
    exact=True,
    chunk=1024,
)

DEFAULT_CHUNK = lengths_for({}, backend(), device_architecture()).chunk


def settings(directory: Path, **more: str) -> Settings:
    path = str(MODEL.directory)
    return load_settings({"MODEL_PATH": path, "KV_CACHE_DIR": str(directory), **more}, None)


def rule() -> CutRule:
    return CutRule(64, marks("qwen3"))


def test_what_is_auto_means_what_was_found(tmp_path: Path) -> None:
    plain = settings(tmp_path)
    meant = with_findings(plain, FOUND, "float32")
    assert is_exact(MODEL, meant) and not is_exact(MODEL, plain)
    chunks = [cut_rule_of(MODEL, each).chunk for each in (plain, meant)]
    assert chunks == [DEFAULT_CHUNK, 1024]


@pytest.mark.parametrize(
    ("more", "found", "dtype"),
    [
        ({}, None, "float32"),
        ({}, FOUND, "bfloat16"),
        ({"DOCTOR": "off"}, FOUND, "float32"),
        ({"CACHE_EXACT": "false", "PREFILL_CHUNK": "128"}, FOUND, "float32"),
        ({}, dataclasses.replace(FOUND, exact=False, chunk=None), "float32"),
    ],
)
def test_nothing_changes_where_nothing_was_found_of_these_weights_or_it_is_set(
    tmp_path: Path, more: dict[str, str], found: Findings | None, dtype: str
) -> None:
    plain = settings(tmp_path, **more)
    assert with_findings(plain, found, dtype) == plain


def test_an_architecture_that_needs_exact_reuse_keeps_it(tmp_path: Path) -> None:
    quantised = loaded("glm4_moe_lite", "bfloat16", 4)
    found = dataclasses.replace(FOUND, exact=False)
    assert is_exact(quantised, with_findings(settings(tmp_path), found, "float32"))


def test_a_start_reads_a_file_and_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks wait for a pause: no forward of the model is between a start and the server."""

    def forward(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a forward at the start")

    monkeypatch.setattr(type(MODEL.model), "__call__", forward)
    doctor = ModelDoctor(settings(tmp_path), MODEL, starts_itself=True)
    checks = doctor.checks(rule(), MemoryGuard())
    assert not checks.step()
    assert doctor.answer("doctor")["state"] == "waiting"
    assert list(tmp_path.iterdir()) == [], "nothing is written either"


@pytest.mark.parametrize(
    ("more", "starts_itself", "state"),
    [
        ({}, True, "waiting"),
        ({"DOCTOR": "off"}, True, "idle"),
        ({"MAX_KV_SIZE_GB": "0"}, True, "idle"),
        ({}, False, "idle"),
    ],
)
def test_who_checks_by_itself(
    tmp_path: Path, more: dict[str, str], starts_itself: bool, state: str
) -> None:
    doctor = ModelDoctor(settings(tmp_path, **more), MODEL, starts_itself)
    doctor.checks(rule(), MemoryGuard())
    assert doctor.answer("doctor")["state"] == state
    assert doctor.answer("check_again")["state"] == "waiting"


def test_findings_take_effect_at_the_next_start_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        running = ""

        def step(self) -> bool:
            return False

        def findings(self) -> Findings:
            return FOUND

    monkeypatch.setattr(doctor_setup, "check_run", lambda *_: Found())
    first = ModelDoctor(settings(tmp_path), MODEL, starts_itself=True)
    told = first.check_now(rule(), MemoryGuard(), print)
    assert told["auto"] == [
        {"setting": "CACHE_EXACT", "now": "false", "next_start": "true"},
        {"setting": "PREFILL_CHUNK", "now": str(DEFAULT_CHUNK), "next_start": "1024"},
    ]
    assert first.settings.cache_exact == "auto"
    second = ModelDoctor(settings(tmp_path), MODEL, starts_itself=True)
    assert second.settings.cache_exact == "true" and second.settings.prefill_chunk == 1024
    second.checks(rule(), MemoryGuard())
    report = second.answer("doctor")
    assert report["state"] == "idle", "checked once"
    assert {row["setting"]: row["now"] for row in report["auto"]} == {
        "CACHE_EXACT": "true",
        "PREFILL_CHUNK": "1024",
    }


def test_checks_take_what_is_free_beside_a_forward_and_nothing_under_pressure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryGuard(lambda: 1000, lambda: 300, lambda depth: 100 * (depth > 4000))
    assert free_bytes(memory) == 600
    assert free_bytes(dataclasses.replace(memory, used=lambda: 2000)) == 0
    monkeypatch.setattr(doctor_setup, "system_pressure", lambda: Pressure.WARNING)
    assert free_bytes(memory) == 0


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([{256: 100.0, 512: 100.0, 1024: 109.0}], None),
        ([{256: 100.0, 512: 100.0, 1024: 110.0, 2048: 120.0}], 2048),
        ([{512: 100.0, 1024: 150.0}, {512: 100.0, 1024: 105.0}], None),
        ([{256: 130.0, 512: 100.0}, {256: 120.0, 512: 100.0}], 256),
        ([{512: 100.0}], None),
    ],
)
def test_another_chunk_is_worth_it_from_a_tenth_on_in_every_round(
    rounds: list[dict[int, float]], best: int | None
) -> None:
    assert best_chunk(rounds, 512) == best
