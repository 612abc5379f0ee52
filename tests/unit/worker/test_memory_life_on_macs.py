"""Leads workers through whole lives on Macs that are not there, and reads what MLX was told."""

from pathlib import Path

import pytest

from hearth.shared.errors import EXIT_CANNOT_START
from hearth.worker.setup import memory_setup
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import layout
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import GB, MACS, Mac
from scripts.harness.mac.worker_life import PROMPTS, lead_through

SMALL, LARGE = layout("Qwen3-4B"), layout("GLM-4.7-Flash")  # 2.3 and 17 GB


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


class Server:
    """Workers of one server on one Mac, and what all of them were told together."""

    def __init__(self, mac: Mac, directory: Path, count: int) -> None:
        self.mac = mac
        self._directory = directory
        self._count = count
        self.workers: dict[int, ImaginedWorker] = {}
        self.told_most = 0  # bytes that all workers together were told they may hold, at any time

    def start(self, number: int, large: bool = False) -> ImaginedWorker:
        socket = self._directory / f"worker-{number}.sock"
        model = LARGE if large else SMALL
        worker = ImaginedWorker(self.mac, model, socket, WORKERS=str(self._count))
        self.workers[number] = worker
        worker.start()
        self._look()
        return worker

    def serve(self, chunks: int = 3) -> None:
        for worker in self.workers.values():
            worker.serve(chunks)
            self._look()

    def stop(self, number: int) -> None:
        self.workers.pop(number).stop()

    def _look(self) -> None:
        self.told_most = max(self.told_most, sum(w.limit for w in self.workers.values()))


@pytest.fixture(autouse=True)
def measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look at each other at every turn."""
    monkeypatch.setattr(memory_setup, "MEASURE_S", 0.0)


def total_of(mac: Mac) -> int:
    return min(mac.recommended_bytes, mac.memory_bytes - min(8 * GB, mac.memory_bytes // 4))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.night)])
def test_workers_are_never_told_more_than_the_limit_together(count: int, tmp_path: Path) -> None:
    """Amid starts, and while the model is switched from a small one to a large one and back."""
    server = Server(MACS[-1], tmp_path, count)
    for number in range(count):
        server.start(number)
        server.serve()
    for number in range(count):
        server.stop(number)
        server.start(number, large=True)
        server.serve()
    assert server.told_most <= total_of(MACS[-1])
    told = sum(worker.limit for worker in server.workers.values())
    assert total_of(MACS[-1]) * 0.99 < told, "but nearly all of it"


def test_a_context_that_was_told_still_fits_when_the_other_worker_has_loaded(
    tmp_path: Path,
) -> None:
    server = Server(MACS[5], tmp_path, 2)
    first = server.start(0, large=True)
    told = first.context()
    server.start(1, large=True)
    server.serve(0)
    assert first.context() == told


def test_a_worker_that_ends_wires_nothing_and_claims_nothing(tmp_path: Path) -> None:
    server = Server(MACS[5], tmp_path, 2)
    worker = server.start(0)
    worker.serve(5)
    assert worker.fake.memory.residency.wired_bytes > SMALL.weight_bytes * 0.99
    server.stop(0)
    assert worker.fake.memory.residency.wired_bytes == 0
    assert not list(tmp_path.iterdir())
