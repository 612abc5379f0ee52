"""Checks the log lines of a long start and of a long prefill."""

import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import load_model
from hearth.worker.schedule import model_load_and_prefill_log as progress_log
from hearth.worker.schedule.model_load_and_prefill_log import LOG_EVERY_S, StartSteps
from hearth.worker.schedule.request_state import Request
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.worker.scripted_scheduler import CHUNK, request, run, scheduler

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


def test_each_of_several_prefills_is_told_by_itself(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = scheduler(slots=2)
    prefilling(made, watch, "one")
    watch.now += 2.0
    prefilling(made, watch, "other", prompt=PROMPT // 2)  # the shortest and the oldest take turns
    watch.now += LOG_EVERY_S
    for _ in range(6):
        list(made.step())
    named = [re.findall(r"request=(\w+)", message)[0] for message in caplog.messages]
    assert sorted(named) == ["one", "other"]


def test_a_prefill_that_is_quick_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = scheduler()
    made.submit(request("quick", prompt=PROMPT))
    run(made)
    assert caplog.messages == []


def test_the_speed_is_that_since_the_line_before(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = scheduler(slots=1)
    prefilling(made, watch, "slower")
    for chunk_s in (LOG_EVERY_S, 2 * LOG_EVERY_S):
        watch.now += chunk_s
        list(made.step())
    speeds = [int(re.findall(r"tokens_per_s=(\d+)", message)[0]) for message in caplog.messages]
    assert speeds == [CHUNK / LOG_EVERY_S, CHUNK / LOG_EVERY_S / 2]


def test_what_was_kept_is_not_counted_as_read() -> None:
    asked = request("warm", prompt=PROMPT)
    asked.position = 5 * CHUNK
    asked.start_times()
    assert asked.times is not None and asked.times.logged_tokens == 5 * CHUNK


# ---------------------------------------------------------------- a start


def until_told(caplog: pytest.LogCaptureFixture, text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.005)


def test_a_step_that_takes_long_is_told_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    steps = StartSteps(lambda: 3 << 20, every_s=0.01)
    steps.begin("files")
    until_told(caplog, "loading step=files s=0\n")
    steps.begin("weights", 7 << 20)
    until_told(caplog, "loading step=weights s=0 held_mb=3 of_mb=7")
    steps.end()


def test_a_start_ends_with_the_seconds_of_each_step(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = StartSteps(lambda: 0, every_s=WAIT_S)
    for name, seconds in (("files", 0.25), ("weights", 12.5), ("cache", 1.0)):
        steps.begin(name)
        watch.now += seconds
    assert steps.end() == "start_s=13.8 files_s=0.2 weights_s=12.5 cache_s=1.0"
    assert caplog.messages == []


def test_nothing_is_said_once_a_start_is_over(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    steps = StartSteps(lambda: 0, every_s=0.01)
    (thread,) = set(threading.enumerate()) - before
    steps.begin("files")
    until_told(caplog, "step=files")
    steps.end()
    thread.join(WAIT_S)
    assert not thread.is_alive()


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
