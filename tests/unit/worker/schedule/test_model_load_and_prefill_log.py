"""Checks the log lines of a long start and of a long prefill."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.schedule import model_load_and_prefill_log as progress_log
from hearth.worker.schedule.model_load_and_prefill_log import StartSteps
from hearth.worker.schedule.request_state import Request
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.worker.scripted_scheduler import CHUNK, request, scheduler

WAIT_S = 60.0
PROMPT = 30 * CHUNK + 1


@dataclass
class Watch:
    """A clock that is set by hand."""

    now: float

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch(0.0)
    monkeypatch.setattr(progress_log, "time", made)
    monkeypatch.setattr(progress_log, "awake_s", made.monotonic)
    return made


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hearth.worker.schedule.model_load_and_prefill_log")


def prefilling(made: Any, watch: Watch, name: str, prompt: int = PROMPT) -> Request:
    """Return a request whose first chunk is read, and whose clock begins now."""
    asked = request(name, prompt=prompt)
    made.submit(asked)
    while not asked.position:
        list(made.step())
    assert asked.times is not None
    asked.times.logged_at, asked.times.logged_tokens = watch.now, asked.position
    return asked


def test_a_prefill_says_how_far_it_is_every_five_seconds_and_nothing_before(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = scheduler(slots=1)
    asked = prefilling(made, watch, "long")
    said = []
    for _ in range(29):  # of a second each
        watch.now += 1.0
        before = len(caplog.messages)
        list(made.step())
        said += [(watch.now, message) for message in caplog.messages[before:]]
    assert asked.is_prefilled
    assert [at for at, _ in said] == [5.0, 10.0, 15.0, 20.0, 25.0]
    assert said[0][1] == (
        f"prefill request=long done={6 * CHUNK} of={PROMPT} tokens_per_s={CHUNK} left_s=24"
    )


# ---------------------------------------------------------------- a start


def test_loading_tells_its_steps_and_what_the_weights_will_take() -> None:
    told: list[tuple[str, int]] = []
    directory = fixture_dir("qwen3")
    settings = load_settings({"MODEL_PATH": str(directory)}, None)
    load_model(settings, lambda *step: told.append(step))
    (weights,) = directory.glob("*.safetensors")
    assert told == [("files", 0), ("weights", weights.stat().st_size), ("hashes", 0)]


def test_a_heartbeat_tells_the_step_and_how_much_of_it_is_there(watch: Watch) -> None:
    held = 3 << 20
    steps = StartSteps(lambda: held, every_s=WAIT_S)
    assert (steps.heartbeat().state, steps.heartbeat().step) == ("loading", "")
    steps.begin("files")
    watch.now += 2.5
    beat = steps.heartbeat()
    assert (beat.step, beat.step_s, beat.step_bytes, beat.held_bytes) == ("files", 2.5, 0, 0)
    steps.begin("weights", 7 << 20)
    assert (steps.heartbeat().held_bytes, steps.heartbeat().step_bytes) == (3 << 20, 7 << 20)
    held = 9 << 20
    assert steps.heartbeat().held_bytes == 7 << 20, "no more than the step brings"
    steps.end()
    assert steps.heartbeat().step == ""
