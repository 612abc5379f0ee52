"""Leads workers through whole lives on Macs that are not there, and reads what MLX was told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.worker.setup import memory_setup
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import layout
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import GB, MACS, Mac
from scripts.harness.mac.worker_life import PROMPTS, Life, lead_through

SMALL, LARGE = layout("Qwen3-4B"), layout("GLM-4.7-Flash")  # 2.3 and 17 GB


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeMac, Life]:
    """A real worker's life on a Mac of 24 GB, with batches and hardly any room for kept KV."""
    fake = FakeMac(Mac("M4", 24), is_imagined=True)
    model, directory = fixture_dir("qwen3", tiny=True), tmp_path_factory.mktemp("life")
    return fake, lead_through(fake, model, directory, CACHE_RAM_BUDGET_MB="1")


def test_a_worker_on_a_mac_answers_and_ends_without_an_error(
    lived: tuple[FakeMac, Life],
) -> None:
    assert lived[1].ends == ["length"] * len(PROMPTS)
    assert lived[1].exit_code == 0


def test_limits_move_on_the_inference_thread_and_only_while_nothing_computes(
    lived: tuple[FakeMac, Life],
) -> None:
    calls = lived[0].calls
    assert {call.thread for call in calls} == {"inference"}
    assert not [call for call in calls if call.is_computing]


def test_the_wired_limit_moves_at_load_and_at_the_end_and_no_batch_moves_it(
    lived: tuple[FakeMac, Life],
) -> None:
    wired = lived[0].calls_of("set_wired_limit")
    assert len(wired) == 3 and wired[-1] == 0


def test_no_kv_of_a_real_worker_is_wired(lived: tuple[FakeMac, Life]) -> None:
    assert "kv" not in lived[0].memory.residency.entered


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

    @property
    def wired(self) -> int:
        return sum(worker.fake.memory.residency.wired_bytes for worker in self.workers.values())


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers look at each other at every turn."""
    monkeypatch.setattr(memory_setup, "MEASURE_S", 0.0)
    yield


def total_of(mac: Mac) -> int:
    return min(mac.recommended_bytes, mac.memory_bytes - min(8 * GB, mac.memory_bytes // 4))


@pytest.mark.usefixtures("measures")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("mac", [MACS[3], MACS[-1]], ids=lambda mac: f"{mac.memory_gb} GB")
def test_workers_that_have_seen_each_other_are_told_the_limit_together(
    mac: Mac, count: int, tmp_path: Path
) -> None:
    server = Server(mac, tmp_path, count)
    for number in range(count):
        server.start(number)
    server.serve()
    told = sum(worker.limit for worker in server.workers.values())
    assert total_of(mac) * 0.99 < told <= total_of(mac)
    assert server.wired <= count * SMALL.weight_bytes * 1.01


@pytest.mark.usefixtures("measures")
@pytest.mark.parametrize("count", [2, 4])
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


@pytest.mark.usefixtures("measures")
def test_a_context_that_was_told_still_fits_when_the_other_worker_has_loaded(
    tmp_path: Path,
) -> None:
    server = Server(MACS[5], tmp_path, 2)
    first = server.start(0, large=True)
    told = first.context()
    server.start(1, large=True)
    server.serve(0)
    assert first.context() == told


def test_a_worker_that_is_refused_leaves_nothing_claimed(tmp_path: Path) -> None:
    server = Server(MACS[2], tmp_path, 2)
    server.start(0)
    with pytest.raises(StartError, match=r"beside the 2\.1 GB of other"):
        server.start(1, large=True)
    assert not list(tmp_path.glob("worker-1*"))


def test_a_worker_that_ends_wires_nothing_and_claims_nothing(tmp_path: Path) -> None:
    server = Server(MACS[5], tmp_path, 2)
    worker = server.start(0)
    worker.serve(5)
    assert worker.fake.memory.residency.wired_bytes > SMALL.weight_bytes * 0.99
    server.stop(0)
    assert worker.fake.memory.residency.wired_bytes == 0
    assert not list(tmp_path.iterdir())
