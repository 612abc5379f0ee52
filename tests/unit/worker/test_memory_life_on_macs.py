"""Leads workers through whole lives on Macs that are not there, and reads what MLX was told."""

from pathlib import Path

from hearth.shared.errors import EXIT_CANNOT_START
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import MACS, Mac
from scripts.harness.mac.worker_life import PROMPTS, lead_through


def test_a_worker_on_a_mac_answers_and_moves_limits_where_nothing_computes(
    tmp_path: Path,
) -> None:
    """A real worker's life on a Mac of 24 GB, with batches and hardly any room for kept KV."""
    fake = FakeMac(Mac("M4", 24), is_imagined=True)
    life = lead_through(fake, fixture_dir("qwen3", tiny=True), tmp_path, CACHE_RAM_BUDGET_MB="1")
    assert (life.ends, life.exit_code) == (["length"] * len(PROMPTS), 0)
    assert {call.thread for call in fake.calls} == {"inference"}
    assert not [call for call in fake.calls if call.is_computing]
    wired = fake.calls_of("set_wired_limit")
    assert len(wired) == 3 and wired[-1] == 0, "at load and at the end; no batch moves it"
    assert "kv" not in fake.memory.residency.entered


def test_a_model_beside_which_nothing_fits_is_let_go_of_before_the_process_ends(
    tmp_path: Path,
) -> None:
    fake = FakeMac(MACS[0], is_imagined=True)
    life = lead_through(fake, fixture_dir("qwen3", tiny=True), tmp_path, MEMORY_LIMIT_MB="2")
    assert life.exit_code == EXIT_CANNOT_START
    assert fake.calls_of("set_wired_limit")[-1] == 0
