"""The end of a worker: how its threads are told, and what it exits with."""

import threading

import pytest

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_STUCK
from hearth.worker.threads import shutdown as module
from hearth.worker.threads.shutdown import EXIT_BROKEN, FETCHING, Shutdown


@pytest.fixture
def shutdown(monkeypatch: pytest.MonkeyPatch) -> Shutdown:
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.01)
    monkeypatch.setattr(module, "CHUNK_WAIT_S", 0.02)
    return Shutdown(lambda: None)


@pytest.fixture
def hung() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_breaks_only_says_that_the_worker_ends() -> None:
    woken: list[None] = []
    shutdown = Shutdown(lambda: woken.append(None))
    assert not shutdown.is_begun()

    def breaks() -> None:
        raise ValueError

    shutdown.start_thread("prompt", breaks).join()
    assert shutdown.is_begun() and shutdown.exit_code == EXIT_BROKEN and woken


def test_the_first_reason_to_end_is_the_one_that_is_told(shutdown: Shutdown) -> None:
    for code in (0, EXIT_CANNOT_START, EXIT_BROKEN, 0):
        shutdown.begin(code)
    assert shutdown.exit_code == EXIT_CANNOT_START


def test_a_start_takes_no_further_step_once_the_worker_ends(shutdown: Shutdown) -> None:
    steps: list[str] = []

    def load() -> None:
        for step in (FETCHING, "weights", "cache"):
            shutdown.record_step(step)
            steps.append(step)
            if step == "weights":
                shutdown.begin()

    shutdown.start_thread("inference", load).join()
    assert steps == [FETCHING, "weights"] and shutdown.exit_code == 0


def test_a_chunk_that_does_not_end_is_told(
    shutdown: Shutdown, hung: threading.Thread, caplog: pytest.LogCaptureFixture
) -> None:
    shutdown.record_step("weights")
    shutdown.begin()
    shutdown.wait_for(hung)
    shutdown.record_end(hung)
    assert shutdown.exit_code == EXIT_STUCK
    assert "the chunk in flight has not ended in 0.02 s" in caplog.text


def test_a_download_is_not_waited_for(
    shutdown: Shutdown, hung: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_WAIT_S", threading.TIMEOUT_MAX)
    shutdown.record_step(FETCHING)
    shutdown.begin()
    shutdown.wait_for(hung)
    shutdown.record_end(hung)
    assert shutdown.exit_code == 0
